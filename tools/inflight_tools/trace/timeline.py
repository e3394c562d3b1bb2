"""Turns a step trace into what each sequence did when: the slices that the exports draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inflight.engine.step_trace import RequestRecord, StepRecord, Trace

__all__ = ["Kind", "Row", "Slice", "Timeline", "build_timeline"]

Kind = Literal["waiting", "prefill", "decode", "preempted"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of time in which a sequence did one thing; seconds from the timeline's origin.

    Attributes:
        kind: "waiting" for a slot, blocks or budget; "prefill" for a chunk of known tokens, which after a
            preemption include output; "decode" for one token from the one before, and drafts; "preempted" from the
            loss of the slot to the next step that computes something.
        step: index into `Timeline.steps`; None if the sequence did not run.
        tokens: tokens computed, drafts included.
        computed: tokens computed before.
        drafts, accepted: drafts that were verified, and those of them that the sequence took.
    """

    kind: Kind
    start: float
    end: float
    step: int | None = None
    tokens: int = 0
    computed: int = 0
    drafts: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Row:
    """A sequence and its slices, in order and without overlap.

    Attributes:
        first_token: end of the step that sampled its first token; None if the trace does not contain it.
        whole: whether the trace contains all of its steps.
        num_sampled: tokens that it sampled in the trace's steps, which can be more than it kept.
    """

    request: RequestRecord
    slices: list[Slice] = field(default_factory=list)
    first_token: float | None = None
    whole: bool = True
    num_sampled: int = 0

    @property
    def label(self) -> str:
        """The request's id, followed by the sequence's index unless that is 0."""
        index = self.request.index
        return str(self.request.request_id) + (f".{index}" if index else "")


@dataclass(slots=True)
class Timeline:
    """All sequences of a trace by arrival.

    Attributes:
        origin: `time.monotonic()` seconds at the timeline's zero.
        end: end of the last step.
        prefill_tokens, decode_tokens, refused_tokens: per step; the last are drafts that were not accepted.
    """

    trace: Trace
    origin: float
    end: float
    rows: list[Row]
    prefill_tokens: list[int]
    decode_tokens: list[int]
    refused_tokens: list[int]

    @property
    def steps(self) -> list[StepRecord]:
        return self.trace.steps

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the traced steps."""
        return sum(min(row.num_sampled, row.request.num_output_tokens) for row in self.rows)

    @property
    def open_seconds(self) -> float:
        """Time in which some sequence waited or ran; the engine was idle in the rest."""
        seconds, until = 0.0, 0.0
        for row in self.rows:  # by arrival
            begin = max(until, row.request.arrival - self.origin)
            end = self.end if row.request.end is None else min(row.request.end - self.origin, self.end)
            seconds, until = seconds + max(0.0, end - begin), max(until, end)
        return seconds


@dataclass(slots=True)
class _SequenceState:
    """State of a sequence while the steps are processed in order."""

    row: Row
    free_from: float
    idle: Kind = "waiting"
    last_step: int | None = None
    catch_up: int = 0  # known tokens that a preemption discarded; computing them is not decoding


def build_timeline(trace: Trace) -> Timeline:
    """Slices of every sequence in the trace.  A trace without steps gives an empty timeline."""
    steps = trace.steps
    # Requests that arrived before the oldest retained step are drawn from that step on.
    ring_start = steps[0].start if steps else 0.0
    whole_from = ring_start if steps and steps[0].number else 0.0
    arrivals = [request.arrival for request in trace.requests]
    origin = ring_start if whole_from else min([ring_start, *arrivals])
    end = max([steps[-1].end - origin, *(a - origin for a in arrivals)]) if steps else 0.0
    progress = {
        request.key: _SequenceState(Row(request), max(0.0, request.arrival - origin)) for request in trace.requests
    }
    prefill, decode, refused = ([0] * len(steps) for _ in range(3))
    for index, step in enumerate(steps):
        for key in step.preempted:
            if (state := progress.get(key)) is not None:
                _preempt(state, step, index, origin)
        for place, key in enumerate(step.keys):
            if (state := progress.get(key)) is None:
                continue
            piece = _advance(state, step, place, index, origin)
            num_refused = piece.drafts - piece.accepted
            (decode if piece.kind == "decode" else prefill)[index] += piece.tokens - num_refused
            refused[index] += num_refused
    for state in progress.values():
        _close(state, end, origin)
    rows = [state.row for state in progress.values() if state.row.slices]
    return Timeline(trace, origin, end, rows, prefill, decode, refused)


def _preempt(state: _SequenceState, step: StepRecord, index: int, origin: float) -> None:
    now = step.start - origin
    if state.last_step != index - 1:
        _fill(state, now)
    state.idle, state.free_from = "preempted", now
    if state.row.slices:
        last = next((s for s in reversed(state.row.slices) if s.step is not None), None)
        if last is not None:
            state.catch_up = max(state.catch_up, last.computed + last.tokens - last.drafts + last.accepted)


def _advance(state: _SequenceState, step: StepRecord, place: int, index: int, origin: float) -> Slice:
    tokens, computed = step.tokens[place], step.computed[place]
    drafts, accepted = step.drafts.get(place, (0, 0))
    row, prompt = state.row, state.row.request.num_prompt_tokens
    start, end = step.start - origin, step.end - origin
    if state.last_step is None:
        row.whole = computed <= row.request.num_cached_tokens
    if state.last_step != index - 1:  # between consecutive steps there is only the engine's loop
        _fill(state, start)
    kind: Kind = "prefill" if tokens - drafts > 1 or computed < max(prompt, state.catch_up) else "decode"
    piece = Slice(kind, start, end, index, tokens, computed, drafts, accepted)
    row.slices.append(piece)
    if step.samples[place]:
        row.num_sampled += 1 + accepted
    if step.samples[place] and row.first_token is None and computed + tokens == prompt:
        row.first_token = end
    state.idle, state.free_from, state.last_step = "waiting", end, index
    return piece


def _fill(state: _SequenceState, until: float) -> None:
    """Add a slice for the time in which the sequence did not run."""
    if until > state.free_from:
        state.row.slices.append(Slice(state.idle, state.free_from, until))
    state.free_from = until


def _close(state: _SequenceState, end: float, origin: float) -> None:
    """Add the slice after a sequence's last step, unless it ended there."""
    ended = state.row.request.end
    until = end if ended is None else min(ended - origin, end)
    ran_last = state.last_step is not None and state.idle == "waiting"
    if not ran_last:
        _fill(state, until)
