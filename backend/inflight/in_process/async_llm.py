"""`AsyncLLM`: the engine in this process, for callers of an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

from inflight.config import EngineConfig
from inflight.in_process.async_pooled_calls import AsyncPooledCalls
from inflight.in_process.local_engine import LocalEngine, OpenRequest
from inflight.in_process.lora import LoRARequest
from inflight.in_process.outputs import RequestOutput, RequestOutputKind
from inflight.in_process.params import SamplingParams
from inflight.in_process.prompts import Conversation, Prompt, read_chat, read_prompt

__all__ = ["AsyncLLM"]

_log = logging.getLogger(__name__)


class AsyncLLM(AsyncPooledCalls):
    """A checkpoint, an engine that a thread steps, and a tokenizer in this process.

    Requests of any number of tasks and loops share the engine's batches.  Cancelling a task, or closing its iterator,
    aborts its request.

    Args:
        model: checkpoint directory, GGUF file or hub id.
        options: any other key of `EngineConfig`.

    Raises:
        ConfigError, LoadError: the options or the checkpoint cannot be used.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LocalEngine("AsyncLLM()", model, options)
        self._steps = _Steps(self.engine)
        # A thread that runs torch while the interpreter ends would crash it.
        self._finalizer = weakref.finalize(self, _close, self._steps, self.engine)

    @property
    def config(self) -> EngineConfig:
        """The engine's options, with the device that was found."""
        return self.engine.config

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far, whenever it has grown; steps made meanwhile come together.

        Args:
            prompt: see `Prompt`.
            sampling_params: None means the checkpoint's defaults (`generation_config`).  `output_kind` chooses
                between all output so far, only new output, and the last output.
            request_id: the outputs carry it; None: a number.
            lora_request: its adapter; None: the checkpoint alone.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
            RequestError: the request failed in the engine.
            RuntimeError: the engine is closed, or this process was forked from the one that made it.
        """
        read = await asyncio.to_thread(read_prompt, prompt, self.engine.tokenizer)
        async for output in self._run(read, sampling_params, request_id, lora_request):
            yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a conversation; the arguments are those of `LLM.chat`.

        Raises:
            ChatTemplateError: there is no template, or it rejects the messages.
            ValueError, RequestError, RuntimeError: as `generate`.
        """
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        engine, replaced = self.engine, chat_template is not None
        read = await asyncio.to_thread(
            lambda: read_chat(messages, options, engine.chat_template(replaced), engine.tokenizer)
        )
        async for output in self._run(read, sampling_params, request_id, lora_request):
            yield output

    async def _run(
        self,
        read: tuple[str | None, list[int]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        adapter: LoRARequest | None,
    ) -> AsyncIterator[RequestOutput]:
        stream = _Stream(asyncio.get_running_loop())
        params = self.engine.defaults if sampling_params is None else sampling_params
        (request,) = await self._submitted(lambda: self.engine.submit([read], [params], stream.advanced, None, adapter))
        kind, sent = params.output_kind, request.result.without_output()
        try:
            finished = False
            while not finished:
                output = await stream.next()
                request.check()
                finished = output.finished
                if request_id is not None:
                    output.request_id = request_id
                if finished or kind is not RequestOutputKind.FINAL_ONLY:
                    yield output.after(sent) if kind is RequestOutputKind.DELTA else output
                sent = output
        finally:
            if not request.result.finished:
                self._abort_all([request])

    async def _submitted(self, submit: Callable[[], list[Any]]) -> list[Any]:
        """The requests that `submit` opens, in a thread; aborted if the caller is cancelled meanwhile."""
        lock, opened, given_up = threading.Lock(), list[Any](), False

        def run() -> None:
            found = submit()
            with lock:
                opened.extend(found)
                is_late = given_up
            if is_late:  # the caller's loop may have ended
                self._abort_all(found)

        try:
            await asyncio.to_thread(run)
        except BaseException:  # also GeneratorExit: the loop ended without another turn for its tasks
            with lock:
                given_up = True
                found = list(opened)
            if found:
                self._abort_all(found)
            raise
        self._steps.wake()
        return opened

    def _abort_all(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self.engine.abort_later(request)
        self._steps.wake()

    def close(self) -> None:
        """Free the checkpoint's memory; open requests fail.  Safe to repeat; `async with` does it at its end."""
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"AsyncLLM({self.engine.description()})"


class _Stream:
    """The newest state of one request, from the thread that steps to the loop that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._newest: RequestOutput | None = None

    def advanced(self, request: OpenRequest) -> None:
        """Called in the thread that steps."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and with it what waited
            self._loop.call_soon_threadsafe(self._put, request.result.snapshot())

    def _put(self, newest: RequestOutput) -> None:
        self._newest = newest
        self._event.set()

    async def next(self) -> RequestOutput:
        await self._event.wait()
        self._event.clear()
        assert self._newest is not None
        return self._newest


class _Steps:
    """The thread that steps an engine while it has open requests."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._condition = threading.Condition()
        self._woken = False
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="inflight-steps", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is a request, or one to abort."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def end(self) -> None:
        """End the thread after its step."""
        with self._condition:
            self._ends = True
            self._condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._woken or self._ends)
                self._woken = False
                if self._ends:
                    return
            self._step_while_open()

    def _step_while_open(self) -> None:
        """Errors of a step have reached the open requests; the next step begins with a new core."""
        while not self._ends:
            try:
                self._engine.step()
            except Exception:
                _log.exception("a step of the engine failed, and its requests with it")
            if not self._engine.has_open:
                return


def _close(steps: _Steps, engine: LocalEngine) -> None:
    steps.end()
    engine.close()
