"""The outputs of `LLM` and `AsyncLLM`, under vLLM's names.  No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from inflight.engine.logprobs import TokenLogprobs
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = [
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "TokenLogprobDict",
    "named_logprobs",
]


class RequestOutputKind(Enum):
    """The outputs that `AsyncLLM` yields: all so far each time, what is new each time, or the last one alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one place.

    Attributes:
        logprob: natural logarithm.
        rank: 1 is the most likely token of the vocabulary.
    """

    logprob: float
    rank: int
    _token_id: int = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False, compare=False)

    @property
    def decoded_token(self) -> str:
        """The token's text inside a sentence."""
        return self._tokenizer.token_text(self._token_id)


# One place of the prompt or output: token id -> its log probability.  The token of the text comes first, then the most
# likely ones in falling order.
TokenLogprobDict = dict[int, Logprob]


def named_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> list[TokenLogprobDict]:
    """(token id, logprob, rank) triples, place by place, as dicts."""
    places = []
    for entry in entries:
        place: TokenLogprobDict = {}
        for token_id, value, rank in entry:
            place.setdefault(token_id, Logprob(value, rank, token_id, tokenizer))
        places.append(place)
    return places


@dataclass
class CompletionOutput:
    """The output of one of a request's n sequences.

    Attributes:
        text: output without the prompt, cut at the stop string that ended it, if any.
        token_ids: output tokens, including the one that ended it.
        finish_reason: "stop" or "length"; None while the sequence runs.
        stop_reason: the stop string or stop token id that ended it.
        cumulative_logprob: sum over the output tokens, if logprobs were requested.
        logprobs: one dict for each token, if they were requested.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobDict] | None = None

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def after(self, earlier: CompletionOutput) -> CompletionOutput:
        """This output without what an earlier state of it has."""
        return replace(
            self,
            text=self.text[len(earlier.text) :],
            token_ids=self.token_ids[len(earlier.token_ids) :],
            logprobs=None if self.logprobs is None else self.logprobs[len(earlier.logprobs or ()) :],
        )


@dataclass
class RequestOutput:
    """Outputs for one prompt.

    Attributes:
        request_id: unique among the requests of this engine.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_logprobs: one dict for each prompt token, if they were requested; None for the first one.
        num_cached_tokens: prompt tokens served by the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobDict | None] | None = None
    num_cached_tokens: int = 0
    request_id: str = ""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def after(self, earlier: RequestOutput) -> RequestOutput:
        """This output without what an earlier state of it has."""
        return replace(self, outputs=[output.after(before) for output, before in zip(self.outputs, earlier.outputs)])

    def without_output(self) -> RequestOutput:
        """As it was before its first token."""
        return replace(self, outputs=[CompletionOutput(output.index) for output in self.outputs])

    def snapshot(self) -> RequestOutput:
        """A copy that later steps leave alone."""
        outputs = [
            replace(
                output,
                token_ids=output.token_ids.copy(),
                logprobs=None if output.logprobs is None else [*output.logprobs],
            )
            for output in self.outputs
        ]
        prompt_logprobs = None if self.prompt_logprobs is None else [*self.prompt_logprobs]
        return replace(self, outputs=outputs, prompt_logprobs=prompt_logprobs)
