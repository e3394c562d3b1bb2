"""A step trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format", Google, 2016.  Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inflight_tools.trace.timeline import Row, Timeline

__all__ = ["perfetto_trace"]

_ENGINE, _REQUESTS = 1, 2  # process ids of the two groups of tracks
_PHASES = ("schedule", "forward", "sample", "update", "send")
# Reserved colour names of chrome://tracing; Perfetto's UI picks colours by slice name.
_COLOURS = {"waiting": "grey", "prefill": "thread_state_iowait", "decode": "thread_state_running", "preempted": "bad"}


def perfetto_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object: step phases and counters in one group, a track per sequence in the other."""
    events = [
        _name("process_name", _ENGINE, 0, "engine"),
        _name("thread_name", _ENGINE, 1, "step"),
        _name("process_name", _REQUESTS, 0, "requests"),
        *_steps(timeline),
    ]
    for number, row in enumerate(timeline.rows, start=1):
        events += _request(row, number)
    trace = timeline.trace
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": trace.model,
            "origin_unix_seconds": timeline.origin + trace.wall_clock,
            "max_num_seqs": trace.max_num_seqs,
            "max_num_batched_tokens": trace.max_num_batched_tokens,
            "block_size": trace.block_size,
            "num_blocks": trace.num_blocks,
        },
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    # Round both ends rather than the duration, so that neighbours do not overlap.
    first = _us(start)
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": first,
        "dur": round(_us(end) - first, 1),
        "args": args,
    }


def _steps(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for index, step in enumerate(timeline.steps):
        start = step.start - timeline.origin
        args = {"step": step.number, "batch size": len(step.keys), "tokens": sum(step.tokens)}
        for phase in _PHASES:
            end = start + getattr(step, phase)
            yield _slice(_ENGINE, 1, phase, start, end, args if phase == "forward" else {"step": step.number})
            start = end
        counters = {
            "tokens": {
                "prefill": timeline.prefill_tokens[index],
                "decode": timeline.decode_tokens[index],
                "refused drafts": timeline.refused_tokens[index],
            },
            "batch size": {"sequences": len(step.keys)},
            "waiting": {"sequences": step.waiting},
            "KV blocks": {"used": step.blocks_used},
        }
        at = _us(step.start - timeline.origin)
        for name, values in counters.items():
            yield {"ph": "C", "name": name, "pid": _ENGINE, "tid": 0, "ts": at, "args": values}
    if timeline.steps:
        for name, values in counters.items():  # back to zero, or the last value would continue forever
            zero = dict.fromkeys(values, 0)
            yield {"ph": "C", "name": name, "pid": _ENGINE, "tid": 0, "ts": _us(timeline.end), "args": zero}


def _request(row: Row, tid: int) -> Iterator[dict[str, Any]]:
    request = row.request
    yield _name("thread_name", _REQUESTS, tid, f"request {row.label}")
    yield {"ph": "M", "name": "thread_sort_index", "pid": _REQUESTS, "tid": tid, "args": {"sort_index": tid}}
    for piece in row.slices:
        args: dict[str, Any] = {}
        if piece.step is not None:
            args = {"step": piece.step, "tokens": piece.tokens, "computed before": piece.computed}
        name = f"prefill {piece.tokens}" if piece.kind == "prefill" else piece.kind
        if piece.drafts:
            args |= {"drafts": piece.drafts, "accepted": piece.accepted}
            name += f", {piece.accepted} of {piece.drafts} drafts"
        yield {
            **_slice(_REQUESTS, tid, name, piece.start, piece.end, args),
            "cat": piece.kind,
            "cname": _COLOURS[piece.kind],
        }
    if request.end is not None and row.slices:
        text = f"end: {request.finish_reason}"
        args = {"prompt tokens": request.num_prompt_tokens, "output tokens": request.num_output_tokens}
        at = _us(row.slices[-1].end)
        yield {"ph": "i", "s": "t", "name": text, "pid": _REQUESTS, "tid": tid, "ts": at, "args": args}
