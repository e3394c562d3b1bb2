"""Deltas of sequences, failed requests, and the state of the engine: the results of a step.  No torch."""

from __future__ import annotations

import msgspec

from inflight.engine.logprobs import Logprobs

__all__ = ["RequestFailed", "SequenceDelta", "SequenceTimes", "StepStats", "TokenColumns"]


class SequenceTimes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The life of a sequence in this engine process so far.

    Attributes:
        admitted: `time.monotonic()` seconds when it first got a slot.
        prefill_steps, decode_steps: steps in which it computed tokens of its prompt, and later ones.
        preemptions: how often it lost its slot and blocks, and got them back.
    """

    admitted: float
    prefill_steps: int
    decode_steps: int
    preemptions: int


class SequenceDelta(msgspec.Struct, array_like=True, gc=False):
    """The output of one step for one sequence.  Never part of a cycle, so the garbage collector need not track it.

    Attributes:
        request_id, index: which sequence.
        token_ids: new tokens: one, several where drafts were accepted, or none when only the end or
            prompt logprobs are new.
        finish_reason: "stop" or "length" on the last delta of the sequence, else None.
        stop_token: the EOS or stop token id that ended it; the last of `token_ids`, and not part of
            the text.
        logprobs: of each new token, if requested.
        prompt_logprobs: of prompt tokens computed in this step, in order; the entry of a prompt's first token is empty.
            Those of a long prompt come in several deltas.  Only the first of the n sequences to run has them.
        num_cached_tokens: prompt tokens served by the prefix cache; set on the first delta.
        times: of a traced request, on its first and its last delta.
        pooled: the vector of a request with pooling; see `StepOutput`.
    """

    request_id: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    times: SequenceTimes | None = None
    pooled: bytes | None = None


class TokenColumns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sequences whose only output in a step is one token, as parallel lists.

    Most of a step's output is this, and integers in lists take a fifth of the time to build, encode and
    decode that a `SequenceDelta` for each would take.
    """

    request_ids: list[int] = []
    indices: list[int] = []
    token_ids: list[int] = []


class TierStats(msgspec.Struct, frozen=True):
    """A KV tier: what it has now, and totals of this engine process.

    Attributes:
        tier: its type; the second one of a type ends with "-2".
        is_open: whether it is asked now; after several errors it is not, for a while.
        load_seconds_total: of the extents that were read.
        errors_total: by their kind: "corrupt", "torn", "full", "timeout" or "io".
    """

    tier: str
    is_open: bool
    num_bytes: int
    load_seconds_total: float
    loaded_total: int
    stored_total: int
    dropped_total: int
    errors_total: dict[str, int]


class TierTotals(msgspec.Struct, frozen=True):
    """KV beyond the pool: prompt tokens looked for and found there, and each tier."""

    queries_total: int
    hits_total: int
    tiers: list[TierStats]


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """State of the engine after a step: times in seconds, and counts.

    `*_total` fields never decrease while the engine process lives; nor do `draft_totals`, see `DraftCounts.totals`.
    """

    running: int
    waiting: int
    preempted_total: int
    blocks_used: int
    blocks_free: int
    prefix_queries_total: int
    prefix_hits_total: int
    prompt_tokens: int
    batch_size: int
    scheduled_tokens: int
    step_seconds: float
    host_blocks_used: int = 0
    swapped_out_total: int = 0
    swapped_in_total: int = 0
    collected_first_total: int = 0
    draft_totals: list[int] = []
    kv_tiers: TierTotals | None = None
    kv_event_batches_total: int = 0
    kv_event_batches_dropped_total: int = 0


class RequestFailed(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """Engine -> frontend: the request was refused, or cannot continue.

    `code` is one of "INVALID_ARG", "UNAVAILABLE", "INTERNAL".  `retry_after` is the seconds after which another
    attempt may succeed; None: unknown.  `shed`: refused because it would have missed its deadline.
    """

    request_id: int
    code: str
    message: str
    retry_after: float | None = None
    shed: bool = False
