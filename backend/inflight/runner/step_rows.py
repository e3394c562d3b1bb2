"""A step's rows on the host, in the form that `make_inputs` takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inflight.device.batch_state import BatchState
from inflight.engine.step import SchedulerOutput
from inflight.runner.step_inputs import Line, StepSize
from inflight.runner.step_upload import ALIGNMENT, StepUpload
from inflight.sampling.rules.ragged import flatten_ranges

__all__ = ["RowWriter", "StepRows"]

_LINE_MULTIPLE = ALIGNMENT // 4  # so that every line of int32 is aligned
_TOKEN_BYTES = 4
_MAX_TOKENS_BESIDE = 2**14


@dataclass(slots=True)
class StepRows:
    """The R rows of a step, T tokens and N logits, on the host; none of it follows from a sampled token.

    Attributes:
        slots, num_computed, counts: int64 [R]; counts are scheduled tokens.
        num_logits: int64 [R].
        num_new_tokens: of rows that enter, and drafts.
        row_of_logits: int64 [N].
        slot_of_logits, position_of_logits: int64 [N]; position of the token that yields the logits.
        adapted: some rows have adapters.
    """

    slots: np.ndarray
    num_computed: np.ndarray
    counts: np.ndarray
    num_logits: np.ndarray
    num_new_tokens: int
    row_of_logits: np.ndarray
    slot_of_logits: np.ndarray
    position_of_logits: np.ndarray
    adapted: bool = False

    @classmethod
    def of(cls, out: SchedulerOutput, adapted: bool = False) -> StepRows:
        slots = np.array(out.slots, dtype=np.int64)
        counts = np.array(out.num_scheduled_tokens, dtype=np.int64)
        computed = np.array(out.num_computed_tokens, dtype=np.int64)
        num_logits = np.array(out.samples, dtype=np.int64)
        num_new_tokens = sum(len(new.token_ids) for new in out.new_rows) // _TOKEN_BYTES
        for row, drafts in out.draft_token_ids.items():
            num_logits[row] += len(drafts)
            num_new_tokens += len(drafts)
        row_of_logits = np.repeat(np.arange(len(slots)), num_logits)
        behind = np.cumsum(num_logits)[row_of_logits] - np.arange(len(row_of_logits))  # 1 for a row's last
        positions = (computed + counts)[row_of_logits] - behind
        own = slots[row_of_logits]
        return cls(slots, computed, counts, num_logits, num_new_tokens, row_of_logits, own, positions, adapted)

    @property
    def size(self) -> StepSize:
        return StepSize(
            len(self.slots),
            int(self.counts.sum()),
            len(self.row_of_logits),
            int(self.counts.max(initial=0)),
            self.num_new_tokens,
            adapted=self.adapted,
        )


class RowWriter:
    """Writes the rows of steps for the device, and remembers which blocks of each slot it has.

    Args:
        state: the host's batch state; its `apply` and this one's of a step come before the step's rows are written.
        max_num_seqs: the void slot's number.
    """

    def __init__(self, state: BatchState, max_num_seqs: int) -> None:
        self._state = state
        self._void_slot = max_num_seqs
        self._num_sent = np.zeros(max_num_seqs, dtype=np.int64)  # leading blocks of each slot that the device has

    def apply(self, out: SchedulerOutput) -> None:
        """Forget the blocks that the step takes from slots."""
        for slot, num_blocks in out.num_kept_blocks.items():
            self._num_sent[slot] = min(self._num_sent[slot], num_blocks)
        for row in out.new_rows:
            self._num_sent[row.slot] = 0

    def write(
        self, out: SchedulerOutput, rows: StepRows, size: StepSize, upload: StepUpload
    ) -> tuple[np.ndarray, Tensor, Tensor]:
        """Put the rows, padded to `size`, and the new blocks of their block tables into `upload`.

        Returns:
            The lines on the host, where `write_tokens` fills in the tokens, and lines and new blocks as `make_inputs`
            takes them.  For equal sizes these have equal addresses if there are at most `size.new_blocks`.
        """
        num_rows, first = len(rows.slots), self._num_sent[rows.slots]
        stride = -(-(size.rows + 1) // _LINE_MULTIPLE) * _LINE_MULTIPLE
        lines, lines_tensor = upload.reserve((len(Line), stride), np.int32)
        lines[:] = 0
        lines[Line.SLOT, :num_rows] = rows.slots
        lines[Line.SLOT, num_rows:] = self._void_slot
        lines[Line.SEQ_LEN, :num_rows] = rows.num_computed + rows.counts
        lines[Line.FIRST_BLOCK, :num_rows] = first
        _write_starts(lines[Line.QUERY_START], rows.counts)
        _write_starts(lines[Line.LOGITS_START], rows.num_logits)
        counts = self._state.num_blocks[rows.slots] - first
        _write_starts(lines[Line.BLOCKS_START], counts)
        places, owners = flatten_ranges(first, counts)
        blocks, blocks_tensor = upload.reserve((max(size.new_blocks, len(owners)),), np.int32)
        blocks[: len(owners)] = self._state.block_table[rows.slots[owners], places]
        return lines, lines_tensor, blocks_tensor

    def write_tokens(self, out: SchedulerOutput, size: StepSize, lines: np.ndarray, upload: StepUpload) -> Tensor:
        """Put the tokens of rows that enter, and drafts, into `upload` and `lines`; int32 [size.new_tokens]."""
        parts = {}
        if out.new_rows:
            row_of_slot = {slot: row for row, slot in enumerate(out.slots)}
            for new in out.new_rows:
                parts[row_of_slot[new.slot]] = np.frombuffer(new.token_ids, dtype=np.int32)
        for row, drafts in out.draft_token_ids.items():
            tokens = np.array(drafts, dtype=np.int32)
            if row in parts:  # a row that enters has all its tokens computed in this step, up to the drafts
                parts[row] = np.concatenate([parts[row], tokens])
            else:
                parts[row] = tokens
                end = out.num_computed_tokens[row] + out.num_scheduled_tokens[row]
                lines[Line.FIRST_TOKEN, row] = end - len(drafts)
        counts = np.zeros(len(out.slots), dtype=np.int64)
        for row, part in parts.items():
            counts[row] = len(part)
        _write_starts(lines[Line.TOKENS_START], counts)
        # Entering prompts leave the room in the one copy to the arrays written after them.
        room, tensor = upload.reserve((size.new_tokens,), np.int32, apart=size.new_tokens > _MAX_TOKENS_BESIDE)
        if parts:
            tokens = np.concatenate([parts[row] for row in sorted(parts)])
            room[: len(tokens)] = tokens
        return tensor

    def sent(self, rows: StepRows) -> None:
        """The written rows are on their way to the device; without this call the next step sends them again."""
        self._num_sent[rows.slots] = self._state.num_blocks[rows.slots]


def _write_starts(line: np.ndarray, counts: np.ndarray) -> None:
    """Where each row's part starts among all parts, [R]; after the last row, where they end."""
    num_rows = len(counts)
    np.cumsum(counts, out=line[1 : num_rows + 1])
    line[num_rows + 1 :] = line[num_rows]
