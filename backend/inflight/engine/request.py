"""A request inside the engine: sampling parameters, status and progress.  No torch."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

import msgspec

__all__ = ["FinishReason", "Request", "SamplingParams", "Status"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen and when it ends.

    Names, ranges and defaults are vLLM's.  `frontend/contract.py` validates what comes from
    the wire; `validate()` is for callers in-process.

    Attributes:
        n: sequences sampled from the prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens below `min_p` times the largest probability, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted once from tokens of the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id -> value added to its logit before everything else.
        bad_words_ids: token id sequences that must not appear in the output.
        stop: texts that end the request; matched by the frontend, which owns the text.
        stop_token_ids: token ids that end the request, beside the checkpoint's EOS ids.
        include_stop_str_in_output: keep the matched stop text in the output.
        ignore_eos: do not end at the checkpoint's EOS ids.
        max_tokens: most output tokens.
        min_tokens: EOS and stop token ids are masked until this many output tokens.
        logprobs: return the chosen token's log probability and this many top ones.
        prompt_logprobs: the same for each prompt token.
        seed: with it the output depends only on (weights, prompt, params, seed).
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words_ids: list[list[int]] = []
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Raise `ValueError` naming the first parameter out of range, its value and the range.

        Args:
            vocab_size: when given, token ids in `logit_bias`, `stop_token_ids` and
                `bad_words_ids` must lie in [0, vocab_size).
        """
        for name, low, high, open_low in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not (value > low if open_low else value >= low) or value > high:  # NaN fails too
                bracket = "(" if open_low else "["
                raise ValueError(f"{name}={value!r} is out of range: allowed is {bracket}{low}, {high}]")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower one or raise the other"
            )
        if vocab_size is not None:
            self._validate_token_ids(vocab_size)

    def _validate_token_ids(self, vocab_size: int) -> None:
        named = [
            ("logit_bias", list(self.logit_bias or ())),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words_ids", [t for word in self.bad_words_ids for t in word]),
        ]
        for name, ids in named:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is not in the vocabulary [0, {vocab_size - 1}]")


_BIG = 2**31 - 1
# name, low, high, low excluded
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("n", 1, 128, False),
    ("temperature", 0.0, 100.0, False),
    ("top_k", -1, _BIG, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 1000.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("max_tokens", 1, _BIG, False),
    ("min_tokens", 0, _BIG, False),
    ("logprobs", 0, 100, False),
    ("prompt_logprobs", 0, 100, False),
    ("seed", -(2**63), 2**64 - 1, False),
)


class Status(enum.Enum):
    """Where a request is.  WAITING holds no blocks and no slot; RUNNING holds both."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    """Why a request ended; the value is what `finish_reason` carries on the wire."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: the unit the scheduler counts.

    A request has `num_tokens` (prompt plus output so far) and `num_computed_tokens` whose KV
    is in the pool; a step gives it tokens so that computed catches up with total.  There is
    no phase flag: prefill, decode, resume after preemption and prefix hits are all that.

    Attributes:
        request_id: unique in the engine; children of an n > 1 request share it.
        index: which of the n sequences this is.
        prompt_token_ids: what `token_ids` starts with.
        token_ids: int32, prompt followed by output; flat memory is cheaper to copy and to hash than objects.
        num_prompt_tokens: where the output starts in `token_ids`.
        num_computed_tokens: leading tokens whose KV is in the pool, once the steps made so far have run.
        num_computable_tokens: leading tokens that can be computed in the blocks it has; never the last one of all,
            whose KV nobody needs.  Owned by `KVPool`.
        num_total_tokens: `num_tokens` and those that these steps will have sampled and that nobody knows yet.
        block_ids: block table; owned by `KVPool`.
        block_hashes: chain hashes of the full blocks, grown by `KVPool`.
        slot: row in the runner's batch state while RUNNING, else -1.
        cache_salt: mixed into the block hashes; equal prefixes with other salts never meet.
        caches_blocks: publish this request's full blocks and look its prefix up.
        children: sequences of the same n > 1 request that wait for this prompt's blocks.
        seed: resolved 64-bit seed of this sequence's noise.
        stop_ids: token ids that end this sequence.
        max_total_tokens: `num_tokens` at which it ends for length.
        milestone: `num_tokens` from which on there is more to tell than a token: its first one, then its last; or
            each, where their log probabilities are asked for.
        num_prompt_logprobs: prompt tokens whose log probabilities were delivered.
    """

    request_id: int
    prompt_token_ids: InitVar[Iterable[int]]
    params: SamplingParams
    index: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    caches_blocks: bool = True
    children: list[Request] = field(default_factory=list)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0

    status: Status = Status.WAITING
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_total_tokens: int = field(init=False)
    milestone: int = field(init=False)
    num_computed_tokens: int = 0
    num_computable_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_prompt_logprobs: int = 0

    def __post_init__(self, prompt_token_ids: Iterable[int]) -> None:
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = self.num_total_tokens = len(self.token_ids)
        self.milestone = self.num_prompt_tokens + 1
        self.max_total_tokens = self.max_total_tokens or self.num_prompt_tokens + self.params.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens
