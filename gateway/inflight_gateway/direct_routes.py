"""Middleware for the endpoints with a body: answers without the framework's routing and its handling of exceptions.

Each layer of those costs a request a tenth of a millisecond, and a stream a call for every chunk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["DirectRoutes"]

Answer = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Request, Exception], Awaitable[Response]]


class DirectRoutes:
    """The innermost middleware.  The application answers all other requests.

    Args:
        app: the wrapped application.
        answers: by path, the function that answers a POST.
        handlers: by type, what answers an exception of such a function; others are raised.
    """

    def __init__(
        self, app: ASGIApp, answers: Mapping[str, Answer], handlers: Mapping[type[Exception], Handler]
    ) -> None:
        self._app = app
        self._answers = answers
        self._handlers = handlers
        self._handled = tuple(handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        http = Request(scope, receive, send)
        try:
            response = await answer(http)
        except self._handled as error:
            handler = next(self._handlers[kind] for kind in self._handled if isinstance(error, kind))
            response = await handler(http, error)
        await response(scope, receive, send)
