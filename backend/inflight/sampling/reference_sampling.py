"""Operations on logits by torch's and numpy's, on any device: the definition of what kernels compute."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.sampling.ops import CountedRow, CountedRows, MatchedWords, PenalisedTokens, WordRow

__all__ = ["REFERENCE", "ReferenceSampling", "penalised"]

_CHUNK = 2**18  # logits masked at once on a CPU, which stay in its cache
# The limits that a byte of a mask sets: eight values, plus infinity for a bit that is 1, minus infinity for 0.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))


class ReferenceSampling:
    """A `SamplingOps`; tokens are drawn by `choose.py`, in groups."""

    draws = False
    draws_masked = False
    compiles = False

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: np.ndarray | None = None) -> Tensor:
        raise NotImplementedError("rows are drawn in groups: draws is False")

    def mask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        """See `SamplingOps.mask`."""
        for start in range(0, len(rows), step := max(1, _CHUNK // logits.shape[-1])):
            _mask(logits, rows[start : start + step], bitmask[start : start + step])

    def penalise(self, logits: Tensor, penalised_tokens: PenalisedTokens) -> None:
        """See `SamplingOps.penalise`."""
        flat, index = logits.view(-1), penalised_tokens.index
        strengths = penalised_tokens.strengths[:, penalised_tokens.columns]
        flat[index] = penalised(flat[index], strengths, penalised_tokens.counts)

    def count_and_penalise(self, logits: Tensor, counted: CountedRows) -> None:
        """See `SamplingOps.count_and_penalise`."""
        rows = [CountedRow(*column) for column in counted.rows.T.tolist()]
        for row in rows:
            _count(counted, row)
        for column, row in enumerate(rows):
            counts, tokens = counted.table.counts[row.count_row], counted.history[row.slot].long()
            drafts = tokens[row.first_position : row.position]
            counts = counts.index_add(0, drafts, counts.new_full((len(drafts),), 2))
            x = penalised(logits[row.row], counted.strengths[:, column], (counts >> 1).float())
            logits[row.row] = torch.where(counts > 0, x, logits[row.row])

    def ban_words(self, logits: Tensor, matched: MatchedWords) -> None:
        """See `SamplingOps.ban_words`."""
        for column in matched.rows.T.tolist():
            row = WordRow(*column)
            words = matched.table.words[:, row.first_word : row.first_word + row.num_words]
            last, sizes, ends = words.long()
            back = torch.arange(1, matched.longest + 1, device=logits.device)
            wanted = matched.table.tokens[(row.first_token + ends[:, None] - back).clamp(min=0)]
            equal = wanted == matched.history[row.slot, (row.position - back).clamp(min=0)]
            matches = (equal | (back > sizes[:, None])).all(1) & (sizes <= row.position - row.num_prompt_tokens)
            bans = torch.where(matches, -torch.inf, torch.inf)
            logits[row.row].scatter_reduce_(0, last, bans, "amin")


def _mask(logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
    """The minimum with plus or minus infinity: on a CPU a tenth of the time of a masked fill by torch."""
    limits = _LIMITS.take(bitmask.view(np.uint8), axis=0).reshape(len(rows), -1)[:, : logits.shape[-1]]
    if not logits.is_cpu:
        index = torch.from_numpy(rows).to(logits.device)
        logits[index] = torch.minimum(logits[index], torch.from_numpy(limits).to(logits.device))
        return
    values = logits.numpy()  # numpy starts no threads, which would have to find each other for each operation
    if rows[-1] - rows[0] == len(rows) - 1:
        masked = values[rows[0] : rows[-1] + 1]
        np.minimum(masked, limits, out=masked)
    else:
        values[rows] = np.minimum(values[rows], limits)


def _count(counted: CountedRows, row: CountedRow) -> None:
    counts, tokens = counted.table.counts[row.count_row], counted.history[row.slot]
    if row.clears:
        counts.zero_()
    prompt = tokens[row.start : min(row.num_prompt_tokens, row.first_position)].long()
    counts.index_fill_(0, prompt, 1)
    output = tokens[max(row.start, row.num_prompt_tokens) : row.first_position].long()
    counts.index_add_(0, output, counts.new_full((len(output),), 2))


def penalised(logits: Tensor, strengths: Tensor, counts: Tensor) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858), then frequency and presence (OpenAI's definition).

    Args:
        logits: float32 [n].
        strengths: float32 [3, n] or [3], repetition, frequency and presence penalty.
        counts: float32 [n], occurrences in the output.
    """
    repetition, frequency, presence = strengths
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)


REFERENCE = ReferenceSampling()
