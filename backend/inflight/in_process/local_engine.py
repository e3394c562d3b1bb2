"""An engine in this process: a checkpoint, a core and a tokenizer, for callers in any thread."""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from inflight.config import ConfigError, EngineConfig
from inflight.engine.adapter import AdapterRef
from inflight.engine.assembly import make_core
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.engine.kv_events.kv_events import KVEvents, expect_kv_events, make_kv_events
from inflight.engine.last_steps import collect_last_steps
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.sampling_params import SamplingParams as EngineParams
from inflight.engine.step_trace import StepTrace, make_trace
from inflight.engine.tiers.tiers import Tiers
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.output.response_tensors import SequenceOutput, sequence_outputs
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import NO_TEXT
from inflight.frontend.request.pooled_prompts import PooledPlan, PooledPrompts
from inflight.frontend.request.pooled_request import void_params
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.in_process.lora import AdapterReader, Adapters, LoRARequest
from inflight.in_process.outputs import CompletionOutput, RequestOutput, named_logprobs
from inflight.in_process.params import SamplingParams, engine_params
from inflight.in_process.pooled_calls import OpenVector
from inflight.in_process.turns import InterruptLater, TurnLock
from inflight.load_phases import show_phases
from inflight.loading.startup import wait_until_kept
from inflight.runner.pipeline import make_runner, placed

if find_spec("transformers") is None:  # only a full load imports it, which is too late to say what to install
    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

__all__ = ["LocalEngine", "OpenRequest"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ANY_NUMBER = 2**31  # of inputs: they are this program's


@dataclass
class OpenRequest:
    """A request in progress: the caller's result, and the text of its sequences.

    Attributes:
        advanced: called, in the thread that steps, after each step that advanced it, with the last one or its failure.
        failure: why the engine gave it up.
    """

    request_id: int
    result: RequestOutput
    sequences: list[SequenceOutput]
    tokenizer: Tokenizer
    advanced: Callable[[OpenRequest], None]
    failure: RequestFailed | None = None

    def check(self) -> None:
        """Raise RequestError if the engine gave it up."""
        if self.failure is not None:
            raise RequestError(self.failure.code, self.failure.message)  # type: ignore[arg-type]

    def take(self, delta: SequenceDelta) -> bool:
        """Process a delta; True if a stop string ended its sequence, which the caller must then abort."""
        if delta.index == 0:
            if delta.num_cached_tokens is not None:
                self.result.num_cached_tokens = delta.num_cached_tokens
            if delta.prompt_logprobs is not None:
                named = [place or None for place in named_logprobs(delta.prompt_logprobs, self.tokenizer)]
                self.result.prompt_logprobs = [*(self.result.prompt_logprobs or []), *named]
        output, sequence = self.result.outputs[delta.index], self.sequences[delta.index]
        if output.finish_reason is not None:
            return False
        sequence.advance(delta)
        output.text += sequence.take_text()
        token_ids = sequence.take_token_ids()
        output.token_ids += token_ids
        output.finish_reason = sequence.finish_reason
        output.stop_reason = sequence.stop_reason
        if output.logprobs is not None and delta.logprobs is not None:
            output.logprobs += named_logprobs(delta.logprobs[: len(token_ids)], self.tokenizer)
            output.cumulative_logprob = sequence.cumulative_logprob
        return sequence.ended_by_stop


class LocalEngine:
    """The engine behind `LLM` and `AsyncLLM`.

    Threads take turns.  After an exception within a turn (of a signal handler, of another thread or of the device) the
    next turn makes the core anew: the checkpoint stays, open requests and the prefix cache are lost.

    Args:
        caller: for errors, such as "LLM()".
        model: checkpoint directory, GGUF file or hub id.
        options: other keys of `EngineConfig`.

    Attributes:
        config: with the device that was found.
        core: the engine; another one after an interrupted turn.
        trace: its step trace, if `step_trace` asks for one.
        chat: the checkpoint's chat template.
        defaults: parameters of a request without any.
        pooled_prompts: checks and tokenises requests for vectors.
        adapters: finds what `LoRARequest`s name.

    Raises:
        ConfigError, LoadError: the options or the checkpoint cannot be used.
    """

    def __init__(self, caller: str, model: str, options: dict[str, Any]) -> None:
        config = EngineConfig.from_dict({"model": model, "max_queue_size": 0, **options}, source=caller)
        self.config = placed(config)
        if self.config.download_dir is not None:
            raise ConfigError(f"{caller}: download_dir is for Triton; set HF_HUB_CACHE before Python starts")
        if self.config.otlp_traces_endpoint is not None:
            raise ConfigError(f"{caller}: otlp_traces_endpoint is for requests through Triton; leave it out")
        self.tokenizer = Tokenizer.load(
            self.config.tokenizer_source,
            revision=self.config.tokenizer_source_revision,
            trust_remote_code=self.config.trust_remote_code,
            required=self.config.tokenizer is not None,
        )
        self.defaults = SamplingParams(
            **{"max_tokens": self.config.default_max_tokens, **generation_defaults(self.config)}
        )
        expect_kv_events(self.config)
        with show_phases(self.config.model):
            self._runner = make_runner(self.config)
        self._kv_events: KVEvents | None = None
        try:
            self._kv_events = make_kv_events(self.config)
            self.core, self.trace = self._new_core()
        except BaseException:
            _close(self._runner.info.tiers, self._kv_events)
            raise
        self.chat: ChatTemplate | None = None
        self._info = self._runner.info
        # Also at the end of a program that does not close it: the KV of its last requests is still being written.
        self._close_tiers = weakref.finalize(self, _close, self._info.tiers, self._kv_events)
        # A short program would end before its weights are kept, each time; it waits no longer than it has loaded.
        atexit.register(wait_until_kept, self._info.load_seconds)
        self.adapters = AdapterReader(self.config)
        self._limits = Limits(self.config, self._info.vocab_size)
        self._ids = itertools.count()
        self._pid = os.getpid()
        self.pooled_prompts = PooledPrompts(
            self._info.pooler,
            self.tokenizer,
            self._info.max_model_len,
            self._info.vocab_size,
            max_inputs=_ANY_NUMBER,
            max_input_bytes=_ANY_NUMBER,
        )
        self._open: dict[int, OpenRequest | OpenVector] = {}
        self._turns = TurnLock()
        self._half_done = False  # since before a turn until its end
        self._closed = False
        self._unwanted: deque[int] = deque()

    @property
    def has_open(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._open)

    def submit(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        advanced: Callable[[OpenRequest], None],
        priorities: Sequence[int] | None = None,
        adapters: Adapters = None,
    ) -> list[OpenRequest]:
        """Queue requests: all, or none.

        Args:
            prompts: text, if known, and token ids of each.
            params: one for each.
            advanced: see `OpenRequest`.
            priorities: one for each, see `AddRequest`; None: all are 0.
            adapters: one for all, or one for each.

        Raises:
            ValueError: a request cannot be served.
            RuntimeError: see `_in_turn`.
        """
        if not self._info.pooler.generates:
            raise ValueError(NO_TEXT)
        asked = []
        refs = self.adapters.refs(adapters, len(prompts))
        for (text, token_ids), given, priority, ref in zip(prompts, params, priorities or itertools.repeat(0), refs):
            if not isinstance(given, SamplingParams):
                raise ValueError(f"sampling_params of type {type(given).__name__}: give inflight.SamplingParams")
            sampling = engine_params(given, self.tokenizer, self._info.max_model_len - len(token_ids))
            self._limits.check_params(sampling)
            asked.append((text, token_ids, sampling, priority, ref))
        added = self._in_turn(lambda: self._add_all(asked, advanced))
        if isinstance(added, RequestFailed):
            raise ValueError(added.message)
        return added

    def submit_pooled(
        self, plans: Sequence[PooledPlan], advanced: Callable[[Any], None], adapter: LoRARequest | None = None
    ) -> list[OpenVector]:
        """Queue the prompts of all plans, or none.

        Raises:
            ValueError: one cannot be served.
            RuntimeError: see `_in_turn`.
        """
        (ref,) = self.adapters.refs(adapter, 1)
        added = self._in_turn(lambda: self._add_pooled(plans, ref, advanced))
        if isinstance(added, RequestFailed):
            raise ValueError(added.message)
        return added

    def step(self) -> None:
        """One step for all open requests.

        Raises:
            RuntimeError: see `_in_turn`.
        """
        if self._in_turn(self._step):
            time.sleep(HELD_POLL_SECONDS)

    def abort(self, requests: Iterable[OpenRequest]) -> None:
        """End requests now; ended ones are ignored.  From a finalizer within a turn: at the next one."""
        if self._closed:
            return
        if self._has_turn_here(0):
            for request in requests:
                self.abort_later(request)
        else:
            self._in_turn(lambda: self._end(requests))

    def abort_later(self, request: OpenRequest) -> None:
        """End a request at the next turn, without waiting for one."""
        self._unwanted.append(request.request_id)

    def description(self) -> str:
        """The model and what the engine made of its options, as keyword arguments."""
        if self._closed:
            return f"{self.config.model!r}, closed"
        config, info = self.config, self._info
        return (
            f"{config.model!r}, device={info.device!r}, dtype={info.dtype!r}, max_model_len={info.max_model_len}, "
            f"max_num_seqs={config.max_num_seqs}, block_size={config.block_size}, num_blocks={info.num_blocks}"
        )

    def close(self) -> None:
        """Free the checkpoint's memory; open requests fail.  Safe to repeat.

        Raises:
            RuntimeError: the caller is within a turn.
        """
        if self._closed:
            return
        self._expect_no_turn_here(0)
        with self._turns:
            self._closed = True
            self._fail_all(f"{self.config.model} was closed")
            if self.chat is not None:
                self.chat.close()
            if not self._half_done and os.getpid() == self._pid:
                self._keep_last_steps()
            self._close_tiers()
            self._info.tiers = None  # it has the pool
            del self.core, self.trace, self._runner
        gc.collect()  # the model's modules refer to each other

    def chat_template(self, replaced: bool = False) -> ChatTemplate:
        """The checkpoint's chat template, or the one that `chat_template` in the options gives.

        Args:
            replaced: the chat brings a template of its own, so that this one need not be usable.
        """
        if self.chat is None:
            self.chat = ChatTemplate.load(
                self.config.tokenizer_source,
                revision=self.config.tokenizer_source_revision,
                override=self.config.chat_template,
                seconds=self.config.chat_template_timeout,
                trusts_requests=True,  # they are this program's
            )
        if not replaced:
            self.chat.check()
        return self.chat

    def _in_turn(self, work: Callable[[], T]) -> T:
        """One thread at a time.  After a turn that did not reach its end, the next one makes the core anew.

        Raises:
            RuntimeError: this process was forked from the one that made the engine, the engine is closed, or the
                caller is within a turn.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM belongs to the process that made it ({self._pid}): a forked one has none of its threads and "
                'would hang; make the LLM there, in a process started with multiprocessing\'s "spawn" method'
            )
        self._expect_no_turn_here(1)
        with InterruptLater(), self._turns:
            if self._closed:
                raise RuntimeError(f"this LLM is closed: make another one for {self.config.model}")
            if self._half_done:
                self._make_anew()
            self._half_done = True
            try:
                while self._unwanted:
                    self._end_ids([self._unwanted.popleft()])
                done = work()
                is_sound = bool(self._open) or self._keep_last_steps()
            except BaseException as error:
                self._fail_interrupted(f"{type(error).__name__}: {error}".rstrip(": "))
                raise
            self._half_done = not is_sound
            return done

    def _keep_last_steps(self) -> bool:
        """Give tiers what the requests that ended last have computed; whether the core can go on."""
        if self._info.tiers is not None:
            try:
                collect_last_steps(self.core)
            except Exception:  # all results are complete
                _log.exception("the step behind the last request failed: KV tiers do not get all of its KV")
                return False
        return True

    def _expect_no_turn_here(self, besides: int) -> None:
        if self._has_turn_here(besides):
            raise RuntimeError("a signal handler or finalizer called this LLM in the middle of its step: call it later")

    def _has_turn_here(self, besides: int) -> bool:
        """Whether this thread is within a turn, or waits for one; `besides` callers of this method do not count."""
        frame, found = sys._getframe(1), 0
        while frame is not None:
            if frame.f_code is LocalEngine._in_turn.__code__ and frame.f_locals["self"] is self:
                found += 1
            frame = frame.f_back  # type: ignore[assignment]
        return found > besides

    def _make_anew(self) -> None:
        self._fail_interrupted("an exception")  # what the interrupted turn left
        self._runner.forget_steps()
        self.core, self.trace = self._new_core()

    def _new_core(self) -> tuple[EngineCore, StepTrace | None]:
        trace = make_trace(self.config, self._runner.info.num_blocks)
        listeners = [] if trace is None else [trace]
        return make_core(self.config, self._runner, listeners=listeners, recorder=self._kv_events), trace

    def _add_all(
        self,
        asked: Sequence[tuple[str | None, list[int], EngineParams, int, AdapterRef | None]],
        advanced: Callable[[OpenRequest], None],
    ) -> list[OpenRequest] | RequestFailed:
        requests: list[OpenRequest] = []
        for text, token_ids, sampling, priority, ref in asked:
            request_id = next(self._ids)
            wants_logprobs = sampling.logprobs is not None
            message = AddRequest(request_id, token_ids, sampling, priority, attached=Attached(adapter=ref))
            request = ParsedRequest(message, shows_logprobs=wants_logprobs)
            refused = self.core.add_request(request.engine_request)
            if refused is not None:
                self._end(requests)
                return refused
            outputs = [CompletionOutput(i, logprobs=[] if wants_logprobs else None) for i in range(sampling.n)]
            result = RequestOutput(text, token_ids, outputs, request_id=str(request_id))
            sequences = sequence_outputs(request, self.tokenizer)
            opened = OpenRequest(request_id, result, sequences, self.tokenizer, advanced)
            self._open[request_id] = opened
            requests.append(opened)
        return requests

    def _add_pooled(
        self, plans: Sequence[PooledPlan], adapter: AdapterRef | None, advanced: Callable[[Any], None]
    ) -> list[OpenVector] | RequestFailed:
        opened: list[OpenVector] = []
        asked = [(prompt, plan.attached(i, adapter)) for plan in plans for i, prompt in enumerate(plan.prompts)]
        for prompt, attached in asked:
            message = AddRequest(next(self._ids), prompt, void_params(), attached=attached)
            refused = self.core.add_request(message)
            if refused is not None:
                self._end(opened)
                return refused
            request = self._open[message.request_id] = OpenVector(message.request_id, prompt, advanced)
            opened.append(request)
        return opened

    def _step(self) -> bool:
        """Whether nothing can run before something outside the engine."""
        if self._open:
            self._take(self.core.step())
        return self.core.only_holds

    def _take(self, message: StepMessage) -> None:
        advanced: dict[int, Any] = {}
        for delta in message.deltas:
            request: Any = self._open[delta.request_id]
            advanced[delta.request_id] = request
            if request.take(delta):
                self.core.abort(delta.request_id, delta.index)
            if request.result.finished:
                del self._open[delta.request_id]
        for failure in message.failed:
            lost = advanced[failure.request_id] = self._open.pop(failure.request_id)
            lost.failure = failure
        for each in advanced.values():
            each.advanced(each)

    def _end(self, requests: Iterable[OpenRequest | OpenVector]) -> None:
        self._end_ids(request.request_id for request in requests)

    def _end_ids(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self.core.abort(request_id)
            self._open.pop(request_id, None)

    def _fail_interrupted(self, cause: str) -> None:
        self._fail_all(f"another request's step was interrupted by {cause}: send it again")

    def _fail_all(self, message: str) -> None:
        request: Any
        for request_id, request in self._open.items():
            request.failure = RequestFailed(request_id, "INTERNAL", message)
            request.advanced(request)
        self._open.clear()


def _close(tiers: Tiers | None, kv_events: KVEvents | None) -> None:
    if kv_events is not None:
        kv_events.close()
    if tiers is not None:
        tiers.close()
