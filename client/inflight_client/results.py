"""Results: the typed chunks of a stream, and the complete result with its timings."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Choice",
    "ChoiceDelta",
    "GenerationResult",
    "Logprob",
    "ResultBuilder",
    "StreamChunk",
    "Timings",
    "TokenLogprobs",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate for a token: its log probability, rank (1 is the most likely) and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# A token's candidates by token id, including the chosen one; None for the first token of a prompt.
TokenLogprobs = dict[int, Logprob] | None


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one of the n sequences in a response.

    Attributes:
        index: which of the n.
        text: new text.
        token_ids: new token ids; empty if not requested.
        num_tokens: number of new tokens.
        finish_reason: "stop" or "length" on the last delta of the sequence, else None.
        logprobs: one entry per new token, if requested.
        cumulative_logprob: sum over all tokens of the sequence so far, if requested.
        stop_reason: the stop string or stop token id that ended the sequence, if requested; else None.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class StreamChunk:
    """A response of a stream; `text`, `token_ids` and `finish_reason` are those of the first sequence.

    Attributes:
        choices: one delta for each of the n sequences.
        num_input_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens from the prefix cache, if requested.
        prompt_logprobs: one entry per prompt token, on the first chunk, if requested.
        elapsed: seconds since the request was first sent.
        checkpoint_id: of the checkpoint that computes the output, if requested.
    """

    choices: list[ChoiceDelta]
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    elapsed: float = 0.0
    checkpoint_id: str | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


@dataclass(slots=True)
class Choice:
    """A finished (or cut off) sequence; fields as in `ChoiceDelta`, over the whole output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt (None if unknown) and of all sequences.

    Attributes:
        cached_tokens: prompt tokens from the prefix cache; None unless requested.
    """

    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Latencies in seconds as seen by this client, including retries.

    Attributes:
        ttft: from sending the request to the first new token; None if there was none.
        itl: gaps between responses with new tokens.  A server that coalesces responses sends several tokens in
            one, so there can be fewer gaps than tokens.
        tpot: mean time per output token after the first, over the longest sequence; None below two
            tokens.
        total: from sending the request to its end.
    """

    ttft: float | None
    itl: list[float]
    tpot: float | None
    total: float


@dataclass(slots=True)
class GenerationResult:
    """A complete answer; `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first sequence.

    Attributes:
        request_id, model: as sent.
        choices: the n sequences.
        usage: token counts.
        timings: as measured by this client.
        prompt_logprobs: one entry per prompt token, if requested.
        attempts: how many times the request was sent.
    """

    request_id: str
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings
    prompt_logprobs: list[TokenLogprobs] | None = None
    attempts: int = 1

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return dataclasses.asdict(self)


class _Sequence:
    """The output of one sequence so far; its many texts are joined on demand."""

    __slots__ = ("_choice", "_texts")

    def __init__(self, index: int) -> None:
        self._choice = Choice(index)
        self._texts: list[str] = []

    @property
    def num_tokens(self) -> int:
        return self._choice.num_tokens

    def add(self, delta: ChoiceDelta) -> None:
        choice = self._choice
        self._texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.num_tokens += delta.num_tokens
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            choice.logprobs = delta.logprobs if choice.logprobs is None else choice.logprobs + delta.logprobs
        if delta.cumulative_logprob is not None:
            choice.cumulative_logprob = delta.cumulative_logprob
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason

    def choice(self) -> Choice:
        """A copy of the sequence so far."""
        self._texts = ["".join(self._texts)]
        return dataclasses.replace(self._choice, text=self._texts[0], token_ids=list(self._choice.token_ids))


class ResultBuilder:
    """Accumulates chunks.  Times are seconds since the request was first sent.

    Args:
        n: number of requested sequences; each has a choice even if nothing arrives.
        num_input_tokens: if the caller knows it (a prompt of token ids).
    """

    def __init__(self, n: int, num_input_tokens: int | None = None) -> None:
        self._sequences = [_Sequence(index) for index in range(n)]
        self.num_input_tokens = num_input_tokens
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self._arrivals: list[float] = []

    def add(self, chunk: StreamChunk) -> None:
        is_new = False
        for delta in chunk.choices:
            self._sequences[delta.index].add(delta)
            is_new = is_new or bool(delta.num_tokens or delta.text)
        if chunk.num_input_tokens is not None:
            self.num_input_tokens = chunk.num_input_tokens
        if self.num_cached_tokens is None:  # for a request that another server continues, the first server's count
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if is_new:
            self._arrivals.append(chunk.elapsed)

    def timings(self, total: float) -> Timings:
        arrivals = self._arrivals
        longest = max(sequence.num_tokens for sequence in self._sequences)
        spread = arrivals[-1] - arrivals[0] if arrivals else 0.0
        return Timings(
            ttft=arrivals[0] if arrivals else None,
            itl=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
            tpot=spread / (longest - 1) if longest > 1 and len(arrivals) > 1 else None,
            total=total,
        )

    def build(self, request_id: str, model: str, attempts: int, total: float) -> GenerationResult:
        return GenerationResult(
            request_id=request_id,
            model=model,
            choices=[sequence.choice() for sequence in self._sequences],
            usage=Usage(
                self.num_input_tokens, sum(sequence.num_tokens for sequence in self._sequences), self.num_cached_tokens
            ),
            timings=self.timings(total),
            prompt_logprobs=self.prompt_logprobs,
            attempts=attempts,
        )
