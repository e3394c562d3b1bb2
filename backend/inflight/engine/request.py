"""A request inside the engine: status and progress.  No torch."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from inflight.engine.attached import Attached
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow

__all__ = ["FinishReason", "Request", "Status"]


class Status(enum.Enum):
    """Where a request is.  A WAITING request holds no blocks and no slot; a RUNNING one holds both."""

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
    """One sequence: the unit that the scheduler counts.

    A request has `num_tokens` (prompt plus output so far) and `num_computed_tokens` whose KV is in the
    pool; a step gives it tokens so that the second catches up with the first.  There is no phase flag: prefill,
    decode, resumption after preemption and prefix hits are all this same process.

    Attributes:
        request_id: unique in the engine; the sequences of an n > 1 request share it.
        index: which of the n sequences this is.
        prompt_token_ids: the start of `token_ids`.
        output_token_ids: output that the request already had when it arrived; it continues from there.
        token_ids: int32, prompt followed by output; flat memory is cheaper to copy and to hash than objects.
        num_prompt_tokens: where the output starts in `token_ids`.
        num_given_tokens: tokens that it arrived with.
        num_computed_tokens: leading tokens whose KV is in the pool, once the steps made so far have run;
            drafts that are being verified included.
        num_computable_tokens: leading tokens that its blocks have room for; never the very last one, since no
            token attends to its KV.  Owned by `KVPool`.
        num_total_tokens: `num_tokens` plus the tokens that the steps made so far are certain to sample.
        block_ids: block table; owned by `KVPool`.
        block_hashes: chain hashes of the full blocks, grown by `KVPool`.
        slot: its place in the runner's batch state while RUNNING, else -1.
        cache_salts: mixed into the block hashes; equal prefixes with different salts never meet.
        caches_blocks: add this request's full blocks to the prefix cache and look its prefix up.
        children: sequences of the same n > 1 request that wait for this prompt's blocks.
        seed: resolved 64-bit seed of this sequence's noise.
        stop_ids: token ids that end this sequence.
        max_total_tokens: `num_tokens` at which it ends because of its length.
        full_delta_at: `num_tokens` at which the next full delta is due: the first token, then the last one;
            or every token, if log probabilities are requested.
        num_prompt_logprobs: prompt tokens whose log probabilities were delivered.
        draft_state: owned by the drafter.
        attached: passed through to the runner; policies, listeners and step hooks read it, the scheduler never does.
        held_until: when it fails unless what it waits for outside the engine has arrived; None: it is not held.
    """

    request_id: int
    prompt_token_ids: InitVar[Iterable[int]]
    params: SamplingParams
    output_token_ids: InitVar[Iterable[int]] = ()
    index: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salts: tuple[str, ...] = ()
    caches_blocks: bool = True
    children: list[Request] = field(default_factory=list)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0
    attached: Attached | None = None

    status: Status = Status.WAITING
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_given_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_total_tokens: int = field(init=False)
    full_delta_at: int = field(init=False)
    num_computed_tokens: int = 0
    num_computable_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_prompt_logprobs: int = 0
    draft_state: Any = None
    held_until: float | None = None

    def __post_init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(output_token_ids)
        self.num_given_tokens = self.num_tokens = self.num_total_tokens = len(self.token_ids)
        self.full_delta_at = self.num_given_tokens + 1
        self.max_total_tokens = self.max_total_tokens or self.num_prompt_tokens + self.params.max_tokens

    @property
    def num_output_tokens(self) -> int:
        is_void = self.attached is not None and self.attached.pooling is not None
        return 0 if is_void else self.num_tokens - self.num_prompt_tokens

    def ends_with(self, token: int, num_tokens: int) -> FinishReason | None:
        """Why `token` as its `num_tokens`-th ends the sequence; None: it continues."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_total_tokens else None

    def new_row(self) -> NewRow:
        """The row that the runner enters into the request's slot."""
        return NewRow(
            self.slot,
            self.request_id,
            self.index,
            self.token_ids.tobytes(),
            self.num_prompt_tokens,
            list(self.block_ids),
            self.params,
            self.seed,
            self.attached,
        )
