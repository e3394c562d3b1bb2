"""The messages between the frontend (Triton's stub) and the engine process.

Frames are MessagePack arrays (`encode`, `decode_to_engine`, `decode_to_frontend`).  One
`StepMessage` per step carries everything that the step produced.  Questions about the engine itself
travel as `Ask` and `Answer`, beside the requests.  No torch, no Triton.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats, TokenColumns
from inflight.engine.pooler_facts import PoolerFacts
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
    "LoadAdapter",
    "Question",
    "Shutdown",
    "StepMessage",
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
    """Frontend -> engine: stop one sequence of a request that has output there, or all of them (`index` None).

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


class LoadAdapter(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Question: load this adapter, if it is not loaded, and say what it is; the answer comes when that has ended.

    The answer: {"name", "id", "rank", "bytes": in memory, "modules": how many have it, "seconds": of the load's work,
    without waits; if it was loaded before, those of that load}.  INVALID_ARG: it cannot be served, and why.
    """

    ref: AdapterRef


# A new question needs a message type here and a handler in the table of `inflight.worker`.  Its docstring
# describes the answer: plain data (None, numbers, text, bytes, lists, dicts).
Question = Union[DumpTrace, GetStats, LoadAdapter]


class Ask(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Frontend -> engine: a question about the engine itself, answered between two steps with an `Answer`.

    Attributes:
        question_id: unique while the frontend lives; a count of its own, apart from requests.
    """

    question_id: int
    question: Question


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
