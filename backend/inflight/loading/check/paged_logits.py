"""The logits of a few sequences as a step computes them: one ragged batch through the pool, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionBackend, forward_context
from inflight.device.batch_state import BatchState
from inflight.device.step_hook import StepHook
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.loading.check.cases import Case, blocks_of

__all__ = ["paged_logits"]

_CHUNKS = (4, 48)  # tokens of each sequence in the first step, and in those after it


@torch.inference_mode()
def paged_logits(
    model: Callable[..., Any],
    backend: AttentionBackend,
    cases: list[Case],
    block_size: int,
    device: torch.device,
    hooks: Sequence[StepHook],
) -> list[Tensor]:
    """float32 logits [length, V] of each sequence, computed as one batch in chunks.

    Writes to the first blocks of the pool: only before the first request, with cases that fit.
    """
    lengths = [len(case.token_ids) for case in cases]
    first_positions = np.array([case.first_position for case in cases])
    state = BatchState(len(cases), max(lengths), block_size, device)
    rows = _rows(cases, block_size)
    computed = [0] * len(cases)
    parts: list[list[Tensor]] = [[] for _ in cases]
    while computed != lengths:
        chunk = _CHUNKS[bool(max(computed))]
        counts = [min(chunk, length - done) for length, done in zip(lengths, computed)]
        slots = [slot for slot, count in enumerate(counts) if count]
        out = SchedulerOutput(
            slots=slots,
            num_scheduled_tokens=[counts[slot] for slot in slots],
            num_computed_tokens=[computed[slot] for slot in slots],
            samples=[False] * len(slots),
            new_rows=rows,
            num_tokens=sum(counts),
        )
        rows = []
        state.apply(out)
        state.fill_rows(out)
        inputs = state.step_inputs(out)
        for hook in hooks:
            hook.step(out, inputs.metadata)
        shift = torch.from_numpy(first_positions[inputs.slot_of_token]).to(device)
        with forward_context(inputs.metadata, backend):
            result = model(input_ids=state.input_ids(inputs), position_ids=inputs.positions + shift, use_cache=False)
        query_start_loc = inputs.metadata.query_start_loc_cpu
        for row, slot in enumerate(slots):
            parts[slot].append(result.logits[0, query_start_loc[row] : query_start_loc[row + 1]].float())
            computed[slot] += counts[slot]
    return [torch.cat(part) for part in parts]


def _rows(cases: list[Case], block_size: int) -> list[NewRow]:
    """A row for each sequence.  To a hook that chooses by a request's length, each is a prompt up to its end."""
    rows, start = [], 0
    for slot, case in enumerate(cases):
        end = start + blocks_of(case, block_size)
        rows.append(
            NewRow(
                slot,
                request_id=slot,
                index=0,
                token_ids=np.array(case.token_ids, dtype=np.int32).tobytes(),
                num_prompt_tokens=case.end,
                block_ids=list(range(start, end)),
                params=SamplingParams(max_tokens=1),
                seed=0,
            )
        )
        start = end
    return rows
