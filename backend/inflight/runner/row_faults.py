"""An exception that one request causes in a step ends that request, and neither the step nor the engine.

Parameters that a rule cannot take are found when the request enters its slot.  Any other exception in a step on the
host is located by halving the step: it can be run again, whole or in parts, and gives the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from inflight.attention.base import AttentionMetadata
from inflight.device.batch_state import StepInputs
from inflight.device.memory import out_of_memory
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput
from inflight.panics import is_panic
from inflight.sampling import SamplingTable

__all__ = ["RowFaults", "fail_rows", "run_without_faulty_rows"]

_log = logging.getLogger(__name__)

_OF_THE_DEVICE = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS")  # after one of these the device runs nothing any more


def _is_of_a_row(error: BaseException) -> bool:
    """Whether one request can be the cause: of a Rust panic, which is no Exception, but of no interrupt or timeout that
    a signal handler raises."""
    if isinstance(error, TimeoutError) or not (isinstance(error, Exception) or is_panic(error)):
        return False
    return not any(text in str(error) for text in _OF_THE_DEVICE)


def _reason(error: BaseException) -> str:
    return f"internal error in a step of this request: {type(error).__name__}: {error}"


def fail_rows(step: StepOutput, reasons: Mapping[int, str]) -> None:
    """These rows fail; row -> why."""
    for row, reason in reasons.items():
        step.row_failures[row] = reason
        step.token_ids[row] = -1
        for found in (step.token_runs, step.logprobs, step.prompt_logprobs, step.pooled):
            found.pop(row, None)  # type: ignore[attr-defined]


class RowFaults:
    """Slots whose sampling parameters cannot be used.  They run as if they had none, and fail.

    Args:
        table: filled through this object.
        eos_token_ids: of the checkpoint.
    """

    def __init__(self, table: SamplingTable, eos_token_ids: Sequence[int]) -> None:
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._reasons: dict[int, str] = {}  # by slot

    def fill_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Take the parameters of rows that enter."""
        for row in new_rows:
            self._reasons.pop(row.slot, None)
            try:
                self._set_row(row, row.params)
            except BaseException as error:
                self._note(row.slot, error)

    def _set_row(self, row: NewRow, params: SamplingParams) -> None:
        sequence = row.request_id, row.index
        self._table.set_row(row.slot, params, row.seed, self._eos_token_ids, row.num_prompt_tokens, sequence)

    def _note(self, slot: int, error: BaseException) -> None:
        if not _is_of_a_row(error):
            raise error
        _log.error("%s", _reason(error), exc_info=error)
        self._reasons[slot] = _reason(error)
        self._table.set_row(slot, SamplingParams(temperature=0.0), 0, self._eos_token_ids, 0)

    def find(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, history: torch.Tensor) -> bool:
        """Look for slots with which `SamplingTable.select` raises, each alone; returns whether there are any.

        Args:
            slots, positions, tokens, history: as for `select`.
        """
        faulty = [slot for slot in set(slots.tolist()) if self._raises(slot, slots, positions, tokens, history)]
        return bool(faulty)

    def _raises(
        self, slot: int, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, history: torch.Tensor
    ) -> bool:
        rows = slots == slot
        try:
            self._table.select(slots[rows], positions[rows], tokens, torch.from_numpy, history)
        except BaseException as error:
            self._note(slot, error)
            return True
        return False

    def of(self, slots: Sequence[int]) -> dict[int, str]:
        """Row -> why it fails, for the rows of a step."""
        if not self._reasons:
            return {}
        return {row: self._reasons[slot] for row, slot in enumerate(slots) if slot in self._reasons}


def run_without_faulty_rows(
    run: Callable[[SchedulerOutput, StepInputs], StepOutput],
    out: SchedulerOutput,
    inputs: StepInputs,
    device: torch.device,
) -> StepOutput:
    """Run a step.  If it raises, run its halves, and theirs: a row that raises alone fails.

    Args:
        run: can be called again for any of the rows: it writes the same KV and samples the same tokens.

    Raises:
        RuntimeError, MemoryError: out of memory or an error of the device, which are no row's fault.
    """
    try:
        return run(out, inputs)
    except BaseException as error:
        if not _is_of_a_row(error) or out_of_memory(error, device) is not None:
            raise
        if len(out.slots) == 1:
            _log.error("%s", _reason(error), exc_info=error)
            step = StepOutput(token_ids=[-1])
            fail_rows(step, {0: _reason(error)})
            return step
        _log.warning("a step of %d requests raised %s: making its halves", len(out.slots), type(error).__name__)
    middle = len(out.slots) // 2
    whole = StepOutput()
    for first, end in ((0, middle), (middle, len(out.slots))):
        part = run_without_faulty_rows(run, *_part(out, inputs, first, end), device)
        whole.token_ids += part.token_ids
        for name in ("token_runs", "logprobs", "prompt_logprobs", "pooled", "row_failures"):
            getattr(whole, name).update({first + row: value for row, value in getattr(part, name).items()})
    return whole


def _part(out: SchedulerOutput, inputs: StepInputs, first: int, end: int) -> tuple[SchedulerOutput, StepInputs]:
    """Rows `first` to `end` of a step whose slots and blocks are filled."""
    counts = out.num_scheduled_tokens[first:end]
    rows = SchedulerOutput(
        slots=out.slots[first:end],
        num_scheduled_tokens=counts,
        num_computed_tokens=out.num_computed_tokens[first:end],
        samples=out.samples[first:end],
        num_tokens=sum(counts),
        draft_token_ids={row - first: ids for row, ids in out.draft_token_ids.items() if first <= row < end},
    )
    metadata = inputs.metadata
    starts, seq_lens = metadata.query_start_loc_cpu[first : end + 1], metadata.seq_lens_cpu[first:end]
    tokens = slice(starts[0], starts[-1])
    logits = (inputs.row_of_logits >= first) & (inputs.row_of_logits < end)
    blocks = -(-max(seq_lens) // metadata.block_size)
    return rows, StepInputs(
        inputs.slot_of_token[tokens],
        inputs.position_of_token[tokens],
        inputs.row_of_logits[logits] - first,
        inputs.logits_indices[logits] - starts[0],
        inputs.positions[:, tokens],
        AttentionMetadata(
            query_start_loc=metadata.query_start_loc[first : end + 1] - starts[0],
            seq_lens=metadata.seq_lens[first:end],
            block_table=metadata.block_table[first:end, :blocks].contiguous(),
            slot_mapping=metadata.slot_mapping[tokens],
            query_start_loc_cpu=[start - starts[0] for start in starts],
            seq_lens_cpu=seq_lens,
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            block_size=metadata.block_size,
        ),
    )
