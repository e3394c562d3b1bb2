"""A step trace as a single HTML page without scripts from elsewhere, which opens from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from inflight_tools.trace.static_baseline import (
    StaticRequest,
    fit_step_cost,
    schedule_static,
    seconds_of_steps,
)
from inflight_tools.trace.timeline import Row, Timeline

__all__ = ["static_requests", "timeline_html"]

_PAGE = Path(__file__).with_name("page.html")
_KINDS = {"waiting": 0, "prefill": 1, "decode": 2, "preempted": 3}
_PLAIN_DECODE = 4  # numbers of a decode without drafts


def timeline_html(timeline: Timeline, title: str | None = None) -> str:
    """The page: `page.html` with the data as a JSON object.

    Args:
        title: what was traced; None uses the name of the checkpoint.
    """
    trace = timeline.trace
    data = {
        "model": title or trace.model,
        "unix": timeline.origin + trace.wall_clock,
        "end": _round(timeline.end),
        "open": _round(timeline.open_seconds),
        "produced": timeline.num_output_tokens,
        "maxSeqs": trace.max_num_seqs,
        "maxTokens": trace.max_num_batched_tokens,
        "blockSize": trace.block_size,
        "blocks": trace.num_blocks,
        "steps": [_step(timeline, index) for index in range(len(timeline.steps))],
        "rows": [_row(timeline, row) for row in timeline.rows],
        "static": _static(timeline),
    }
    text = msgspec.json.encode(data).decode().replace("</", "<\\/")  # a name must not end the script
    return _PAGE.read_text(encoding="utf-8").replace("/*DATA*/null", text)


def static_requests(timeline: Timeline) -> list[StaticRequest]:
    """The sequences for the static baseline: sequences that the trace covers from arrival to end."""
    return [
        StaticRequest(
            row.label,
            row.request.arrival - timeline.origin,
            row.request.num_prompt_tokens - row.request.num_cached_tokens,
            output,
        )
        for row in timeline.rows
        if row.whole and row.request.finish_reason in ("stop", "length") and (output := row.request.num_output_tokens)
    ]


def _static(timeline: Timeline) -> dict[str, Any] | None:
    requests = static_requests(timeline)
    if not requests:
        return None
    cost = fit_step_cost(timeline)
    schedule = schedule_static(requests, cost)
    batches = [
        [
            _round(batch.start),
            _round(batch.prefill_end),
            _round(batch.end),
            batch.iterations,
            [[slot.label, slot.output, _round(slot.busy_end)] for slot in batch.slots],
        ]
        for batch in schedule.batches
    ]
    return {
        "size": schedule.batch_size,
        "requests": len(requests),
        "end": _round(schedule.end),
        "seconds": _round(schedule.seconds),
        "ours": _round(seconds_of_steps(timeline, {request.label for request in requests}, cost)),
        "idle": schedule.idle_share,
        "arrivals": {request.label: _round(request.arrival) for request in requests},
        "batches": batches,
    }


def _step(timeline: Timeline, index: int) -> list[float]:
    step = timeline.steps[index]
    phases = (step.schedule, step.forward, step.sample, step.update, step.send)
    return [
        step.number,
        _round(step.start - timeline.origin),
        _round(step.end - timeline.origin),
        *(round(phase * 1e3, 3) for phase in phases),
        timeline.prefill_tokens[index],
        timeline.decode_tokens[index],
        len(step.keys),
        step.waiting,
        step.blocks_used,
        timeline.refused_tokens[index],
    ]


def _row(timeline: Timeline, row: Row) -> dict[str, Any]:
    request = row.request
    arrival = request.arrival - timeline.origin
    return {
        "label": row.label,
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "output": request.num_output_tokens,
        "reason": request.finish_reason,
        "arrival": _round(arrival),
        "first": None if row.first_token is None else _round(row.first_token),
        "end": None if request.end is None else _round(request.end - timeline.origin),
        "slices": _slices(row),
    }


def _slices(row: Row) -> list[list[float]]:
    """The slices as the page reads them.

    Waiting and preempted: [kind, start, end].  Prefill: [kind, step, tokens, computed before].  Decodes in
    consecutive steps: one [kind, first step, last step, computed before the first].  A slice with drafts is never of
    several steps; it ends with [..., drafts, accepted].
    """
    found: list[list[float]] = []
    for piece in row.slices:
        kind = _KINDS[piece.kind]
        drafts = [piece.drafts, piece.accepted] if piece.drafts else []
        if piece.step is None:
            found.append([kind, _round(piece.start), _round(piece.end)])
        elif piece.kind == "prefill":
            found.append([kind, piece.step, piece.tokens, piece.computed, *drafts])
        elif drafts:
            found.append([kind, piece.step, piece.step, piece.computed, *drafts])
        elif found and found[-1][0] == kind and found[-1][2] == piece.step - 1 and len(found[-1]) == _PLAIN_DECODE:
            found[-1][2] = piece.step
        else:
            found.append([kind, piece.step, piece.step, piece.computed])
    return found


def _round(seconds: float) -> float:
    return round(seconds, 6)
