"""The engine in this process, without Triton: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.engine.logprobs import TokenLogprobs
from inflight.engine.messages import AddRequest, RequestFailed, SequenceDelta
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import make_trace
from inflight.frontend.errors import RequestError
from inflight.frontend.output.response_tensors import SequenceOutput, sequence_outputs
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.llm_prompts import Prompt, is_prompt, read_prompt
from inflight.runner.pipeline import make_runner, placed

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]


@dataclass
class CompletionOutput:
    """The output of one of a request's n sequences.

    Attributes:
        text: output without the prompt, cut at the stop string that ended it, if any.
        token_ids: output tokens, including the one that ended it.
        finish_reason: "stop" or "length"; None while the sequence runs.
        stop_reason: the stop string or stop token id that ended it.
        cumulative_logprob: sum over the output tokens, if logprobs were requested.
        logprobs: for each token, (token id, logprob, rank) triples: the token itself, then the top ones.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class RequestOutput:
    """Outputs for one prompt.

    Attributes:
        prompt: the prompt's text; None if it was given as token ids.
        prompt_logprobs: entry i is for prompt token i; the first is empty.
        num_cached_tokens: prompt tokens served by the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass
class _OpenRequest:
    """A request in progress: the caller's result, and the text of its sequences."""

    result: RequestOutput
    sequences: list[SequenceOutput]
    failure: RequestFailed | None = None

    def take(self, delta: SequenceDelta) -> bool:
        """Process a delta; True if a stop string ended its sequence, which the caller must then abort."""
        if delta.index == 0:
            if delta.num_cached_tokens is not None:
                self.result.num_cached_tokens = delta.num_cached_tokens
            if delta.prompt_logprobs is not None:
                self.result.prompt_logprobs = [*(self.result.prompt_logprobs or []), *delta.prompt_logprobs]
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
            output.logprobs += delta.logprobs[: len(token_ids)]
            output.cumulative_logprob = sequence.cumulative_logprob
        return sequence.ended_by_stop


class LLM:
    """A checkpoint, an engine and a tokenizer in this process.

    Args:
        model: checkpoint directory or hub id.
        options: any other key of `EngineConfig`, e.g. `dtype="float32"`, `max_num_seqs=8`.

    Raises:
        ConfigError, LoadError: the options or the checkpoint cannot be used.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_dict({"model": model, "max_queue_size": 0, **options}, source="LLM()")
        self.config = placed(config)
        if self.config.download_dir is not None:
            raise ConfigError("LLM(): download_dir is for Triton; set HF_HUB_CACHE before Python starts")
        self.tokenizer = Tokenizer.load(
            self.config.tokenizer_source,
            revision=self.config.tokenizer_source_revision,
            trust_remote_code=self.config.trust_remote_code,
            required=self.config.tokenizer is not None,
        )
        self._defaults = SamplingParams(
            **{"max_tokens": self.config.default_max_tokens, **generation_defaults(self.config)}
        )
        runner = make_runner(self.config)
        self.trace = make_trace(self.config, runner.info.num_blocks)
        self.core = make_core(self.config, runner, listeners=[] if self.trace is None else [self.trace])
        self._limits = Limits(self.config, self.core.info.vocab_size)
        self._next_id = 0
        self._pid = os.getpid()
        self._open: dict[int, _OpenRequest] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch; results come in the order of the prompts.

        Args:
            prompts: one or several, see `Prompt`.
            params: one for all prompts or one per prompt; None means the checkpoint's defaults (`generation_config`).

        Raises:
            ValueError: a prompt or parameter cannot be served, or exceeds `max_n` or `max_logprobs`; nothing has run.
            RequestError: a request failed in the engine; the others are aborted.
            RuntimeError: this process was forked from the one that made the LLM.
        """
        requests = self._submit(prompts, params)
        try:
            for _ in self._run(requests):
                pass
        finally:
            self._abort(requests)
        return [request.result for request in requests.values()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the request's state after each step that advanced it.  Closing the iterator aborts the request.

        Raises:
            ValueError, RequestError, RuntimeError: as `generate`.
        """
        requests = self._submit([prompt], params)
        try:
            for _ in self._run(requests):
                yield from (request.result for request in requests.values())
        finally:
            self._abort(requests)

    def _submit(self, prompts: Any, params: Any) -> dict[int, _OpenRequest]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM belongs to the process that made it ({self._pid}): a forked one has none of its threads and "
                'would hang; make the LLM there, in a process started with multiprocessing\'s "spawn" method'
            )
        prompts = [prompts] if is_prompt(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._defaults] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} params: give one for all or one per prompt")
        read = [read_prompt(prompt, self.tokenizer) for prompt in prompts]  # before any of them runs
        for sampling in params:
            self.tokenizer.check_texts(sampling.stop)
            self._limits.check_params(sampling)
        requests: dict[int, _OpenRequest] = {}
        for (text, token_ids), sampling in zip(read, params):
            request_id, self._next_id = self._next_id, self._next_id + 1
            if sampling.seed is None:
                sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(os.urandom(8), "little"))
            wants_logprobs = sampling.logprobs is not None
            request = ParsedRequest(AddRequest(request_id, token_ids, sampling), shows_logprobs=wants_logprobs)
            failure = self.core.add_request(request.engine_request)
            if failure is not None:
                self._abort(requests)
                raise ValueError(failure.message)
            outputs = [CompletionOutput(i, logprobs=[] if wants_logprobs else None) for i in range(sampling.n)]
            sequences = sequence_outputs(request, self.tokenizer)
            requests[request_id] = self._open[request_id] = _OpenRequest(
                RequestOutput(text, token_ids, outputs), sequences
            )
        return requests

    def _run(self, requests: dict[int, _OpenRequest]) -> Iterator[None]:
        """Step until all of `requests` are finished; yields after each step that advanced one of them.

        Steps also serve other open requests (an interleaved `stream()`).  Raises RequestError if one of
        `requests` fails in the engine.
        """
        while not all(request.result.finished for request in requests.values()):
            for request in requests.values():
                if request.failure is not None:
                    raise RequestError(request.failure.code, request.failure.message)  # type: ignore[arg-type]
            if self._step() & requests.keys():
                yield

    def _step(self) -> set[int]:
        """One step of the engine; returns the ids of the requests that it advanced."""
        message = self.core.step()
        if self.core.only_holds:
            time.sleep(HELD_POLL_SECONDS)
        advanced: set[int] = set()
        for delta in message.deltas:
            request = self._open[delta.request_id]
            advanced.add(delta.request_id)
            if request.take(delta):
                self.core.abort(delta.request_id, delta.index)
            if request.result.finished:
                del self._open[delta.request_id]
        for failure in message.failed:
            self._open.pop(failure.request_id).failure = failure
        return advanced

    def _abort(self, requests: dict[int, _OpenRequest]) -> None:
        for request_id in requests:
            self.core.abort(request_id)
            self._open.pop(request_id, None)
