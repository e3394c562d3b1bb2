"""The engine in-process, without Triton: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest, SequenceDelta, TokenLogprobs
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.contract import GenerationRequest
from inflight.frontend.outputs import SequenceOutput
from inflight.frontend.text import Tokenizer
from inflight.runner.pipeline import make_runner

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]


@dataclass
class CompletionOutput:
    """One of a request's n sequences.

    Attributes:
        text: output without the prompt; cut at the stop string that ended it, if any.
        token_ids: output tokens, the one that ended it included.
        finish_reason: "stop" or "length"; None while the sequence runs.
        stop_reason: the stop string or stop token id that ended it.
        cumulative_logprob: sum over the output's tokens, when logprobs were asked for.
        logprobs: per token (token id, logprob, rank) triples: the token, then the top ones.
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
    """What became of one prompt.  `prompt_logprobs[i]` speaks of prompt token i; the first is empty."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass
class _Open:
    """A request under way: what its caller gets, and the text side of its sequences."""

    result: RequestOutput
    sequences: list[SequenceOutput]

    def take(self, delta: SequenceDelta) -> bool:
        """Take a delta in; True when a stop string ended its sequence and the engine must be told."""
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
        output.token_ids += sequence.take_token_ids()
        output.finish_reason = sequence.finish_reason
        output.stop_reason = sequence.stop_reason
        if output.logprobs is not None:
            output.logprobs += sequence.take_logprobs()
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
        self.config = EngineConfig.from_dict({"model": model, "max_queue_size": 0, **options}, source="LLM()")
        self.tokenizer = Tokenizer.load(
            self.config.tokenizer_source,
            revision=self.config.revision,
            trust_remote_code=self.config.trust_remote_code,
        )
        self.core = EngineCore(self.config, make_runner(self.config))
        self._next_id = 0
        self._open: dict[int, _Open] = {}

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched; results in the order of the prompts.

        Args:
            prompts: a text, texts, or lists of token ids.
            params: one for all, or one per prompt; None takes the defaults.

        Raises:
            ValueError: a prompt or parameter that cannot be served; nothing has run then.
        """
        requests = self._submit(prompts, params)
        for _ in self._run(requests):
            pass
        return [request.result for request in requests.values()]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the request's state after each step that moved it.  Closing the iterator aborts it."""
        requests = self._submit([prompt], params)
        try:
            for _ in self._run(requests):
                yield from (request.result for request in requests.values())
        finally:
            self._abort(requests)

    def _submit(self, prompts: Any, params: Any) -> dict[int, _Open]:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams(max_tokens=self.config.default_max_tokens)] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} params: give one for all or one per prompt")
        requests: dict[int, _Open] = {}
        for prompt, sampling in zip(prompts, params):
            text = prompt if isinstance(prompt, str) else None
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
            request_id, self._next_id = self._next_id, self._next_id + 1
            if sampling.seed is None:
                sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(os.urandom(8), "little"))
            failure = self.core.add_request(AddRequest(request_id, token_ids, sampling))
            if failure is not None:
                self._abort(requests)
                raise ValueError(failure.message)
            wants_logprobs = sampling.logprobs is not None
            outputs = [CompletionOutput(i, logprobs=[] if wants_logprobs else None) for i in range(sampling.n)]
            request = GenerationRequest(token_ids, sampling, shows_logprobs=wants_logprobs)
            sequences = [SequenceOutput(request, self.tokenizer) for _ in outputs]
            requests[request_id] = self._open[request_id] = _Open(RequestOutput(text, token_ids, outputs), sequences)
        return requests

    def _run(self, requests: dict[int, _Open]) -> Iterator[None]:
        """Step until all of `requests` are finished; yields after each step that moved one of them.

        Other open requests (an interleaved `stream()`) are served on the way.
        """
        while not all(request.result.finished for request in requests.values()):
            moved = False
            for delta in self.core.step().deltas:
                request = self._open[delta.request_id]
                moved = moved or delta.request_id in requests
                if request.take(delta):
                    self.core.abort(delta.request_id, delta.index)
                if request.result.finished:
                    del self._open[delta.request_id]
            if moved:
                yield

    def _abort(self, requests: dict[int, _Open]) -> None:
        for request_id in requests:
            self.core.abort(request_id)
            self._open.pop(request_id, None)
