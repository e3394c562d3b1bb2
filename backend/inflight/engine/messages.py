"""The messages between the frontend (Triton's stub) and the engine process.

Frames are MessagePack arrays (`encode`, `decode_to_engine`, `decode_to_frontend`).  One
`StepMessage` per step carries everything that the step produced.  Questions about the engine itself
travel as `Ask` and `Answer`, beside the requests.  No torch, no Triton.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from inflight.engine.attached import Attached
from inflight.engine.logprobs import Logprobs
from inflight.engine.pooling import PoolerFacts
from inflight.engine.sampling_params import SamplingParams

__all__ = [
    "REQUESTS_PER_FRONTEND",
    "AbortRequest",
    "AddRequest",
    "Answer",
    "Ask",
    "DumpTrace",
    "EngineFailed",
    "EngineReady",
    "GetStats",
    "Question",
    "RequestFailed",
    "SequenceDelta",
    "SequenceTimes",
    "Shutdown",
    "StepMessage",
    "StepStats",
    "TokenColumns",
    "decode_to_engine",
    "decode_to_frontend",
    "encode",
]

# Frontend number k of an engine numbers its requests from k times this, so ids are unique among all frontends.
REQUESTS_PER_FRONTEND = 2**36


class AddRequest(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Frontend -> engine: generate.

    Attributes:
        request_id: unique while the engine process lives; chosen by the frontend (`REQUESTS_PER_FRONTEND`).
        prompt_token_ids: at least one id.
        params: validated; `seed` is resolved, never None.
        priority: a smaller number is served sooner.
        tenant: the account that the request is charged to; "" is the common account.
        deadline: `time.monotonic()` seconds (one clock for all processes on a machine).
        cache_salt: only requests with the same salt share prefixes in the cache.
        arrival: `time.monotonic()` when the frontend received the request; None means now.
        output_token_ids: tokens that each of the n sequences has already produced; [] starts all from the
            prompt. None: that sequence has ended and does not run.
        replayed: an engine process that died had accepted it: the queue's limits do not apply to it.
        attached: data for policies, listeners and step hooks.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    arrival: float | None = None
    output_token_ids: list[list[int] | None] = []
    replayed: bool = False
    attached: Attached | None = None


class AbortRequest(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Frontend -> engine: stop one sequence of a request, or all of them (`index` None).

    No delta follows for an aborted sequence; its blocks are free after the step in flight.
    """

    request_id: int
    index: int | None = None


class Shutdown(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Frontend -> engine: finish the step in flight and exit with status 0."""


class DumpTrace(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Question: the step trace, as the bytes that `step_trace.Trace.to_json` writes."""


class GetStats(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Question: the engine's present load, as the dict that `operator_stats.engine_stats` makes."""


# A new question needs a message type here and a handler in the table of `inflight.worker`.  Its docstring
# describes the answer: plain data (None, numbers, text, bytes, lists, dicts).
Question = Union[DumpTrace, GetStats]


class Ask(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Frontend -> engine: a question about the engine itself, answered between two steps with an `Answer`.

    Attributes:
        question_id: unique while the frontend lives; a count of its own, apart from requests.
    """

    question_id: int
    question: Question


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


class StepMessage(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """Engine -> frontend: all that one step produced.

    Attributes:
        full_deltas: sequences with more output than one token: their first, their last, several, or log probabilities.
        stats: counters after the step; `prefix_*_total` count tokens.
        tokens: the other sequences that got a token.
        failed: requests that cannot continue: a step failed, or they waited too long for something outside the engine.
        leads: the frontend publishes the metrics of the engine as a whole; exactly one of several does.
    """

    full_deltas: list[SequenceDelta]
    stats: StepStats
    tokens: TokenColumns = TokenColumns()
    failed: list[RequestFailed] = []
    leads: bool = True

    @property
    def num_tokens(self) -> int:
        """New output tokens, of all sequences."""
        return len(self.tokens.token_ids) + sum(len(delta.token_ids) for delta in self.full_deltas)

    @property
    def deltas(self) -> list[SequenceDelta]:
        """One per sequence that got a token or ended."""
        rows = zip(self.tokens.request_ids, self.tokens.indices, self.tokens.token_ids)
        return [*self.full_deltas, *[SequenceDelta(request_id, index, [token]) for request_id, index, token in rows]]


class EngineReady(msgspec.Struct, array_like=True, tag=13, frozen=True):
    """Engine -> frontend, once: the checkpoint is loaded and the pool is allocated.  `leads` as in `StepMessage`."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    attention_backend: str
    load_seconds: float
    leads: bool = True
    pooler: PoolerFacts = PoolerFacts()


class EngineFailed(msgspec.Struct, array_like=True, tag=14, frozen=True):
    """Engine -> frontend: loading or a step failed for good; the process exits after sending it.

    `fatal` means that a restart cannot help (the checkpoint does not fit or is rejected).
    """

    message: str
    fatal: bool = False


class Answer(msgspec.Struct, array_like=True, tag=15, frozen=True):
    """Engine -> frontend: the answer to the `Ask` with this id, or why there is none.

    Attributes:
        value: described in the question's docstring.
        error: (code, message) instead of a value; the codes of `RequestFailed`.
    """

    question_id: int
    value: Any = None
    error: tuple[str, str] | None = None


ToEngine = Union[AddRequest, AbortRequest, Shutdown, Ask]
ToFrontend = Union[StepMessage, RequestFailed, EngineReady, EngineFailed, Answer]

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
