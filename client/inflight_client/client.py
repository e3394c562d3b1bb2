"""The two clients.  They have the same methods; `AsyncClient`'s are awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inflight_client.connection import Connection, ConnectionOptions, Protocol
from inflight_client.endpoints import Routing, split_urls
from inflight_client.errors import DeadlineExceededError, ServerUnreachableError
from inflight_client.pooled_calls import AsyncPooledCalls, PooledCalls
from inflight_client.pooling import Pooled
from inflight_client.questions import (
    Question,
    control_question,
    detokenize_question,
    json_answer,
    model_question,
    tokenize_question,
    tokenizer_question,
)
from inflight_client.request import ChatOptions, GenerationRequest, Message, RequestOptions
from inflight_client.results import GenerationResult
from inflight_client.retry import RetryPolicy
from inflight_client.servers import AsyncServers, BlockingServers
from inflight_client.stream import AsyncStream, Stream

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    InputIds = Sequence[int] | np.ndarray

__all__ = ["AsyncClient", "Client"]


class _BaseClient:
    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        protocol: Protocol = "grpc",
        model: str = "demo",
        timeout: float | None = None,
        retries: RetryPolicy | None = None,
        routing: Routing | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        """Connects on the first call.

        With several servers, each attempt goes to the first one that has not failed recently (`Endpoints`), and an
        interrupted stream is continued on the next one: its result equals that of an uninterrupted stream.  The
        servers must serve the same checkpoint in the same way.

        Args:
            url: `host:port`; None means 127.0.0.1 and Triton's default port for the protocol.  Several servers are
                separated by commas, or a list, the preferred one first.
            protocol: "grpc" (port 8001) or "http" (port 8000), of all servers.
            model: default model.
            timeout: default limit for a request in seconds; None: no limit.
            retries: what to do while a server is unavailable; None means `RetryPolicy()`.
            routing: chooses among the servers that have not failed recently; None: the first of them.
            options: headers and TLS, see `ConnectionOptions`.

        Raises:
            ValueError, TypeError: see `Connection.build`.
        """
        self.model = model
        self.timeout = timeout
        self.retries = retries or RetryPolicy()
        self._connect([Connection.build(one, protocol, options) for one in split_urls(url)], routing)

    def _connect(self, connections: list[Connection], routing: Routing | None) -> None:
        raise NotImplementedError

    def _request(self, prompt: str | None, messages: Any, input_ids: Any, options: Any) -> GenerationRequest:
        return GenerationRequest.build(prompt, messages, input_ids, options, model=self.model, timeout=self.timeout)


def _pauses(timeout: float) -> Iterator[float]:
    """Seconds between two checks of a server that is starting, growing to half a second."""
    deadline, pause = time.monotonic() + timeout, 0.05
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(0.5, pause * 1.5)


def _not_ready(timeout: float, reason: str) -> DeadlineExceededError:
    return DeadlineExceededError(f"not ready after {timeout:g} s: {reason}")


class Client(_BaseClient, PooledCalls):
    """Blocking client: `with Client("host:8001", model="demo") as client: ...`.

    Threads can share it; requests are independent of each other and are cancelled individually.
    """

    def _connect(self, connections: list[Connection], routing: Routing | None) -> None:
        self._servers = BlockingServers(connections, self.retries.stall_timeout, routing)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Send a request and return the iterator of its chunks.

        Args:
            prompt: text to continue.
            messages: a chat of {"role": ..., "content": ...}; the server applies the chat template.
            input_ids: token ids of the prompt.
            options: see `RequestOptions`.

        Raises:
            ValueError, TypeError: see `GenerationRequest.build`.  Errors of the server are raised by
                the iterator.
        """
        return self.send(self._request(prompt, messages, input_ids, options))

    def send(self, request: GenerationRequest) -> Stream:
        """Send a request that exists, such as `Stream.rest` of another client's stream."""
        return Stream(request, self.retries, self._servers)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Send a request and wait for the complete answer; arguments as in `stream`.

        Raises:
            InflightError: the request failed; `partial` has the output that arrived before.
        """
        stream = self.stream(prompt, messages=messages, input_ids=input_ids, **options)
        with stream:
            for _ in stream:
                pass
        return stream.result()

    def _pooled(self, pooling: Mapping[str, Any], options: Any) -> Pooled | None:
        with self.stream(pooling=pooling, **options) as stream:
            for _ in stream:
                pass
        return stream.pooled

    def health(self) -> bool:
        """Whether a server answers and is live."""
        try:
            return self._servers.first(lambda server: server.server_live())
        except ServerUnreachableError:
            return False

    def ready(self, model: str | None = None) -> bool:
        """Whether a server answers and its model (default: the client's) accepts requests."""
        return self._servers.unready(model or self.model) is None

    def responds(self, model: str | None = None) -> bool:
        """Whether a server's model is ready and answers a question within 5 s.

        Triton also reports a model as ready whose stub process is stopped or hangs.  For models of this project: a
        model of another backend can take the question for a request.
        """
        return self._servers.any_responds(model or self.model)

    def wait_until_ready(self, timeout: float = 60.0, model: str | None = None) -> None:
        """Block until `ready()`.

        Raises:
            DeadlineExceededError: not ready after `timeout` seconds; the message says why.
        """
        model, pauses = model or self.model, _pauses(timeout)
        while (reason := self._servers.unready(model)) is not None:
            pause = next(pauses, None)
            if pause is None:
                raise _not_ready(timeout, reason)
            time.sleep(pause)

    def metadata(self, model: str | None = None) -> dict[str, Any]:
        """Name, versions, inputs and outputs of the model (default: the client's)."""
        return self._servers.first(lambda server: server.model_metadata(model or self.model))

    def repository_index(self) -> list[dict[str, Any]]:
        """The models of the server's repository: `name`, and `version`, `state` and `reason` if known.

        Raises:
            InflightError: no server answers, or it requires a key for this.
        """
        return self._servers.first(lambda server: server.repository_index())

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return self._servers.first(lambda server: server.server_metadata())

    def control(
        self,
        name: str,
        model: str | None = None,
        timeout: float = 60.0,
        admin_key: str | None = None,
        parameters: Mapping[str, str | bool] | None = None,
    ) -> str:
        """Ask the model's engine for something other than text, such as `"step_trace"`.

        Args:
            name: value of the request parameter `control`, see docs/wire-contract.md.
            model: None for the client's.
            timeout: seconds to wait for the answer.
            admin_key: the key that `inflight serve` printed at its start; None for a server without one.
            parameters: of the question, such as {"lora_name": "doll"} of "unload_adapter".

        Raises:
            InflightError: no server answers, or it refuses.
            ValueError: a parameter with a NUL, where Triton would end it.
        """
        return self._ask(control_question(name, admin_key, parameters), model, timeout)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        **chat: Unpack[ChatOptions],
    ) -> dict[str, Any]:
        """The tokens of a text or chat: `{"count": 3, "max_model_len": 2048, "tokens": [5, 8, 2]}`.

        Args:
            prompt, messages: one of them, as in `stream`.
            add_special_tokens: add the special tokens that the tokenizer puts around a text; None: as in a request for
                text: True for a prompt, and False for messages, because the template adds its own.
            return_token_strs: add "token_strs", the vocabulary's entries.
            truncate_prompt_tokens: as in a request for text; adds "prompt", the text that is kept.
            model: None for the client's.
            timeout: seconds to wait for the answer.
            chat: options of the chat template, see `ChatOptions`.

        Raises:
            ValueError, TypeError: see `GenerationRequest.build`.
            InflightError: no server answers, or it refuses.
        """
        question = tokenize_question(
            prompt, messages, chat, add_special_tokens, return_token_strs, truncate_prompt_tokens
        )
        return json_answer(self._ask(question, model, timeout))

    def detokenize(self, token_ids: InputIds, *, model: str | None = None, timeout: float = 60.0) -> str:
        """The text of token ids, special tokens spelt out; arguments and errors as in `tokenize`."""
        return str(json_answer(self._ask(detokenize_question(token_ids), model, timeout))["prompt"])

    def model_info(self, model: str | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """Facts about the model that do not change while it is loaded, see docs/wire-contract.md.

        Raises:
            InflightError: no server answers, or the model is not one of Inflight's.
        """
        return json_answer(self._ask(model_question(), model, timeout))

    def tokenizer_info(self, model: str | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """The settings of the model's tokenizer, with its chat template; errors as in `model_info`."""
        return json_answer(self._ask(tokenizer_question(), model, timeout))

    def _ask(self, question: Question, model: str | None, timeout: float) -> str:
        return self._servers.first(lambda server: server.control(model or self.model, question, timeout))

    def close(self) -> None:
        """Cancel open requests and close the connections; further calls raise RuntimeError."""
        self._servers.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_BaseClient, AsyncPooledCalls):
    """Client for one event loop: `async with AsyncClient("host:8001", model="demo") as client: ...`."""

    def _connect(self, connections: list[Connection], routing: Routing | None) -> None:
        self._servers = AsyncServers(connections, routing)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """As `Client.stream`, but not awaited: `async for chunk in client.stream(...)`."""
        return self.send(self._request(prompt, messages, input_ids, options))

    def send(self, request: GenerationRequest) -> AsyncStream:
        """As `Client.send`."""
        return AsyncStream(request, self.retries, self._servers)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """As `Client.generate`."""
        stream = self.stream(prompt, messages=messages, input_ids=input_ids, **options)
        async with stream:
            async for _ in stream:
                pass
        return stream.result()

    async def _pooled(self, pooling: Mapping[str, Any], options: Any) -> Pooled | None:
        async with self.stream(pooling=pooling, **options) as stream:
            async for _ in stream:
                pass
        return stream.pooled

    async def health(self) -> bool:
        """As `Client.health`."""
        try:
            return await self._servers.first(lambda server: server.server_live())
        except ServerUnreachableError:
            return False

    async def ready(self, model: str | None = None) -> bool:
        """As `Client.ready`."""
        return await self._servers.unready(model or self.model) is None

    async def responds(self, model: str | None = None) -> bool:
        """As `Client.responds`."""
        return await self._servers.any_responds(model or self.model)

    async def wait_until_ready(self, timeout: float = 60.0, model: str | None = None) -> None:
        """As `Client.wait_until_ready`."""
        model, pauses = model or self.model, _pauses(timeout)
        while (reason := await self._servers.unready(model)) is not None:
            pause = next(pauses, None)
            if pause is None:
                raise _not_ready(timeout, reason)
            await asyncio.sleep(pause)

    async def metadata(self, model: str | None = None) -> dict[str, Any]:
        """As `Client.metadata`."""
        return await self._servers.first(lambda server: server.model_metadata(model or self.model))

    async def repository_index(self) -> list[dict[str, Any]]:
        """As `Client.repository_index`."""
        return await self._servers.first(lambda server: server.repository_index())

    async def server_metadata(self) -> dict[str, Any]:
        """As `Client.server_metadata`."""
        return await self._servers.first(lambda server: server.server_metadata())

    async def control(
        self,
        name: str,
        model: str | None = None,
        timeout: float = 60.0,
        admin_key: str | None = None,
        parameters: Mapping[str, str | bool] | None = None,
    ) -> str:
        """As `Client.control`."""
        return await self._ask(control_question(name, admin_key, parameters), model, timeout)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        **chat: Unpack[ChatOptions],
    ) -> dict[str, Any]:
        """As `Client.tokenize`."""
        question = tokenize_question(
            prompt, messages, chat, add_special_tokens, return_token_strs, truncate_prompt_tokens
        )
        return json_answer(await self._ask(question, model, timeout))

    async def detokenize(self, token_ids: InputIds, *, model: str | None = None, timeout: float = 60.0) -> str:
        """As `Client.detokenize`."""
        return str(json_answer(await self._ask(detokenize_question(token_ids), model, timeout))["prompt"])

    async def model_info(self, model: str | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """As `Client.model_info`."""
        return json_answer(await self._ask(model_question(), model, timeout))

    async def tokenizer_info(self, model: str | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """As `Client.tokenizer_info`."""
        return json_answer(await self._ask(tokenizer_question(), model, timeout))

    async def _ask(self, question: Question, model: str | None, timeout: float) -> str:
        return await self._servers.first(lambda server: server.control(model or self.model, question, timeout))

    async def close(self) -> None:
        """As `Client.close`."""
        await self._servers.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
