"""Step trace: the work of each of the last steps, its sequences, and its times.  No torch.

One `StepRecord` per step reuses the lists that the step has anyway; nothing is formatted before a question arrives.
docs/tracing.md describes how to ask; `inflight trace` draws the answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from inflight.config import EngineConfig
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import FinishReason, Request

__all__ = ["FORMAT", "RequestRecord", "StepRecord", "StepTrace", "Trace", "TraceError", "make_trace", "sequence_key"]

FORMAT = "inflight step trace 1"

_MAX_N = 128  # sequences of one request (`SamplingParams.n`)
_MAX_ENDED = 4096  # a step ends no more sequences; further sequences aborted before a step are not kept


class TraceError(ValueError):
    """A file or answer that is not a step trace."""


def sequence_key(request_id: int, index: int) -> int:
    """One integer that identifies a sequence: cheaper to store than a pair."""
    return request_id * _MAX_N + index


class StepRecord(msgspec.Struct, array_like=True):
    """One step.  Durations are seconds; `running` to `blocks_free` are the state after the step.

    Attributes:
        number: counts the engine's steps that ran a batch, from 0.
        start: `time.monotonic()` seconds.
        schedule, forward, sample, update: the four parts of the step, one after the other.  On a
            GPU `forward` ends when its kernels are launched and `sample` includes waiting for them.
            A step that was made while the previous one ran (`async_scheduling`) has `schedule` 0.
        send: writing the step's message to the frontend; 0 in-process.
        keys: sequences of the batch, in batch order; the next three lists are parallel.
        tokens: how many tokens each computed, drafts included.
        computed: how many each had computed before.
        samples: whether each sampled.
        preempted: sequences that lost slot and blocks while the step was made.
        ended: sequences that ended with this step, or were aborted before the next one.
        drafts: place in the batch -> how many drafts the sequence had, and how many were accepted.
    """

    number: int
    start: float
    schedule: float
    forward: float
    sample: float
    update: float
    send: float
    running: int
    waiting: int
    blocks_used: int
    blocks_free: int
    keys: list[int]
    tokens: list[int]
    computed: list[int]
    samples: list[bool]
    preempted: list[int]
    ended: list[int]
    drafts: dict[int, tuple[int, int]] = {}

    @property
    def end(self) -> float:
        """When the scheduler had processed the step's tokens; the message to the frontend is sent after it."""
        return self.start + self.schedule + self.forward + self.sample + self.update


class RequestRecord(msgspec.Struct, array_like=True):
    """One sequence and its progress; times are `time.monotonic()` seconds.

    Attributes:
        key: `sequence_key` of the next two fields.
        arrival: when the frontend received the request.
        num_cached_tokens: prompt tokens that the prefix cache served.
        end: when it ended, None while it lives.
        finish_reason: "stop", "length", "abort", or None while it lives.
    """

    key: int
    request_id: int
    index: int
    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    end: float | None
    finish_reason: str | None


class Trace(msgspec.Struct):
    """The content of the ring when it was read, and of a trace file.

    Attributes:
        format: `FORMAT`.
        wall_clock: `time.time()` less `time.monotonic()` in the engine process, seconds.
        model: checkpoint, as the configuration names it.
        requests: the sequences that the steps name, and the waiting ones.
        steps: oldest first, without gaps.
    """

    format: str
    wall_clock: float
    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    requests: list[RequestRecord]
    steps: list[StepRecord]

    def to_json(self) -> bytes:
        """The file: one JSON object; records are arrays in the order of their fields."""
        return _encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Trace:
        """Raises TraceError unless `to_json` wrote `data`."""
        try:
            trace = _decode(data)
        except msgspec.DecodeError as error:
            raise TraceError(f"not a step trace: {error}") from None
        if trace.format != FORMAT:
            raise TraceError(f"format is {trace.format!r}: this version reads {FORMAT!r}")
        return trace

    def last(self, count: int) -> Trace:
        """The last `count` steps and the sequences that they name."""
        steps = self.steps[-count:]
        named = {key for step in steps for key in (*step.keys, *step.preempted, *step.ended)}
        requests = [request for request in self.requests if request.key in named or request.end is None]
        return msgspec.structs.replace(self, requests=requests, steps=steps)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Trace).decode


class StepTrace(EngineListener):
    """A bounded ring of steps, with the sequences that they name.

    Args:
        config: `num_traced_steps` is how many steps to keep; other options go into the `Trace`.
        num_blocks: of the KV pool.
        clock: seconds, on the engine's clock.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = config.num_traced_steps
        sizes = config.max_num_seqs, config.step_tokens, config.block_size
        self._head = (config.model, *sizes, num_blocks)
        self._clock = clock
        self._steps: deque[StepRecord] = deque()
        self._live: dict[int, Request] = {}
        # An ended sequence is dropped when the step that ended it leaves the ring: no later step names it.
        self._ended: dict[int, RequestRecord] = {}
        self._ended_in_step: list[Request] = []
        self._number = 0
        self._unsent: StepRecord | None = None  # the step whose message is not sent yet
        self._key_of: dict[int, int] = {}  # slot -> the sequence in it

    def arrived(self, sequences: Sequence[Request]) -> None:
        for request in sequences:
            self._live[sequence_key(request.request_id, request.index)] = request

    def step_done(self, step: DoneStep) -> None:
        out, result, stats = step.out, step.result, step.stats
        sampling = result.ended if result.forward_end is None else result.forward_end
        preempted = [self._key_of[slot] for slot in out.preempted]  # before their slots have new owners
        for row in out.new_rows:
            self._key_of[row.slot] = sequence_key(row.request_id, row.index)
        record = StepRecord(
            self._number,
            step.start,
            result.started - step.start,
            sampling - result.started,
            result.ended - sampling,
            step.end - result.ended,
            0.0,
            stats.running,
            stats.waiting,
            stats.blocks_used,
            stats.blocks_free,
            [self._key_of[slot] for slot in out.slots],
            out.num_scheduled_tokens,
            out.num_computed_tokens,
            out.samples,
            preempted,
            [],
            {row: (len(ids), len(result.token_runs.get(row, [0])) - 1) for row, ids in out.draft_token_ids.items()},
        )
        self._number += 1
        if len(self._steps) == self.limit:
            for key in self._steps.popleft().ended:
                self._ended.pop(key, None)
        self._steps.append(record)
        self._unsent = record
        for request in self._ended_in_step:
            self._end(request, step.end)
        self._ended_in_step.clear()

    def step_failed(self, step: DoneStep) -> None:
        self.step_done(step)

    def ended(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ABORT:
            self._end(request, self._clock())
        else:  # by the step that is done next
            self._ended_in_step.append(request)

    def sent(self, seconds: float) -> None:
        """Record how long it took to send the output of the last step."""
        if self._unsent is not None:
            self._unsent.send, self._unsent = seconds, None

    def _end(self, request: Request, now: float) -> None:
        """Record the end of a sequence in the last step."""
        key = sequence_key(request.request_id, request.index)
        if self._live.pop(key, None) is None or not self._steps or len(self._steps[-1].ended) >= _MAX_ENDED:
            return
        self._ended[key] = _record(request, now)
        self._steps[-1].ended.append(key)

    def snapshot(self) -> Trace:
        """The present content; later steps do not change it, except for the `send` of its last step."""
        requests = [*self._ended.values(), *(_record(request, None) for request in self._live.values())]
        requests.sort(key=lambda request: (request.arrival, request.key))
        return Trace(FORMAT, time.time() - time.monotonic(), *self._head, requests, list(self._steps))


def make_trace(config: EngineConfig, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> StepTrace | None:
    """The trace that `model.json` asks for; None if it is off."""
    return StepTrace(config, num_blocks, clock) if config.num_traced_steps else None


def _record(request: Request, end: float | None) -> RequestRecord:
    return RequestRecord(
        sequence_key(request.request_id, request.index),
        request.request_id,
        request.index,
        request.arrival_time,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.num_output_tokens,
        end,
        None if request.finish_reason is None else request.finish_reason.value,
    )
