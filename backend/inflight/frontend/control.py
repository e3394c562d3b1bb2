"""Requests that ask the engine about itself: the request parameter `control` names the question."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from inflight.engine.messages import DumpTrace, Question
from inflight.frontend.contract import WireRequest
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.open_stream import Responder
from inflight.frontend.streams import Streams

__all__ = ["question_of", "relay"]

_QUESTIONS: dict[str, Question] = {"step_trace": DumpTrace()}


def question_of(wire: WireRequest) -> Question | None:
    """The question that the request puts to the engine; None if it asks for text.

    Raises:
        RequestError: INVALID_ARG; an unknown `control`.
    """
    control = wire.parameters.get("control")
    if control is None:
        return None
    if not isinstance(control, str) or control not in _QUESTIONS:
        known = " or ".join(f'"{name}"' for name in _QUESTIONS)
        raise RequestError("INVALID_ARG", f"control={shown(control)}: must be {known}")
    return _QUESTIONS[control]


def relay(answer: Future[Any], streams: Streams, responder: Responder) -> None:
    """Send the engine's answer (text or bytes) to the client, or why there is none.

    The thread that resolves `answer` reads the engine's pipe and must not block, so the response is
    left to the streams' sender thread.
    """
    answer.add_done_callback(lambda done: _send(done, streams, responder))


def _send(done: Future[Any], streams: Streams, responder: Responder) -> None:
    try:
        outputs = {"text_output": np.array([done.result()], dtype=np.object_)}
    except RequestError as error:
        streams.reject(responder, error)
    else:
        streams.respond(responder, outputs)
