"""`grammar`: only tokens with which the output can still become what the grammar says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, Grammar, Grammars, MaskJob, SequenceId, mask_words
from inflight.grammars.spec import GrammarSpec
from inflight.sampling.ops import SamplingOps
from inflight.sampling.rules.base import LogitsRule, RowBatch

__all__ = ["GrammarMask", "Mask", "grammar_rule"]


def grammar_rule(grammars: Grammars) -> type[LogitsRule]:
    """The rule for the vocabulary of one checkpoint."""
    return type("CheckpointGrammarMask", (GrammarMask,), {"grammars": grammars})


class GrammarMask:
    """A `LogitsRule`.

    For a GPU, masks are made in a thread while it computes the step's logits.  On a CPU they are made after the logits,
    on all cores: the threads of the forward pass wait for each other, so a thread that takes a core from one of them
    stops them all.

    Attributes:
        grammars: set by `grammar_rule`.
        eos_token_ids: of the checkpoint.
    """

    is_mask: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(grammar=GrammarSpec("regex", "(?s:.*)"))
    grammars: ClassVar[Grammars]

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._sequences: list[Grammar | None] = [None] * max_num_seqs
        self._ignores_eos = np.zeros(max_num_seqs, dtype=bool)
        self._not_eos = np.full(mask_words(vocab_size), 2**32 - 1, dtype=np.uint32)
        self.eos_token_ids: set[int] = set()
        self._overlaps = device.type != "cpu"
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[np.ndarray] | None = None

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        self._sequences[slot] = None
        if params.grammar is None:
            return False
        self._sequences[slot] = self.grammars.walk(sequence, params.grammar)
        self._ignores_eos[slot] = params.ignore_eos
        self.eos_token_ids.update(eos_token_ids)
        for token in eos_token_ids:
            self._not_eos[token // 32] &= np.uint32(2**32 - 1 - 2 ** (token % 32))
        return True

    def prepare(self, batch: RowBatch) -> Mask:
        self._wait()  # a step that failed never applied its mask
        jobs = []
        firsts = np.flatnonzero(batch.positions == batch.first_positions)
        slots, starts = batch.slots[firsts].tolist(), batch.first_positions[firsts].tolist()
        prompts, rows = batch.num_prompt_tokens[firsts].tolist(), firsts.tolist()
        for slot, start, prompt, row, end in zip(slots, starts, prompts, rows, [*rows[1:], len(batch.rows)]):
            sequence = self._sequences[slot]
            assert sequence is not None
            known = prompt + sequence.num_tokens
            if known < start:  # else the drafter has brought it here
                sequence.advance(batch.token_ids[slot, known:start].tolist())
            drafts = batch.token_ids[slot, start : start + end - row - 1].tolist() if end - row > 1 else ()
            jobs.append(MaskJob(sequence, row, drafts))
        ignores_eos = self._ignores_eos[batch.slots]
        if not self._overlaps:
            return LateMask(batch.ops, batch.rows, jobs, ignores_eos, self)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._filling = self._thread.submit(self.bitmask_of, jobs, ignores_eos)
        return Mask(batch.ops, batch.rows, jobs, self._filling.result)

    def bitmask_of(self, jobs: list[MaskJob], ignores_eos: np.ndarray) -> np.ndarray:
        """int32 [r, mask_words(V)] for `jobs`, whose rows are 0 to r - 1, and `ignores_eos` bool [r]."""
        bitmask = np.empty((len(ignores_eos), mask_words(self._vocab_size)), dtype=np.int32)
        self.grammars.fill(jobs, bitmask, in_background=self._overlaps)
        if ignores_eos.any():
            words = sorted({token // 32 for token in self.eos_token_ids})
            not_eos = self._not_eos.view(np.int32)
            rows = np.flatnonzero(ignores_eos & (bitmask[:, words] & ~not_eos[words]).any(axis=1))
            going_on = bitmask[rows] & not_eos
            can_go_on = going_on.any(axis=1)
            bitmask[rows[can_go_on]] = going_on[can_go_on]
        return bitmask

    def _wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None


@dataclass(slots=True)
class Mask:
    """A `LogitsMask` of r rows.

    Attributes:
        ops: of the device.
        jobs: what it is made for; their `row` counts `rows`.
        make: returns `bitmask`, and waits for it.
    """

    ops: SamplingOps
    rows: np.ndarray
    jobs: list[MaskJob]
    make: Callable[[], np.ndarray]
    failures: dict[int, str] = field(default_factory=dict)

    def bitmask(self) -> np.ndarray:
        bitmask = self.make()
        for job in self.jobs:
            if job.grammar.error:
                self.failures[int(self.rows[job.row])] = job.grammar.error
        return bitmask

    def apply(self, logits: Tensor) -> None:
        self.ops.mask(logits, self.rows, self.bitmask())

    def still_needed(self, token_ids: np.ndarray, certain: np.ndarray, whole: np.ndarray) -> Mask | None:
        return self


class LateMask(Mask):
    """A mask that is made when it is applied.

    Most tokens of a model that follows the grammar are allowed, and looking up one token is quick.  The
    slow masks are also those with most tokens: the ones that allow almost anything.
    """

    def __init__(
        self, ops: SamplingOps, rows: np.ndarray, jobs: list[MaskJob], ignores_eos: np.ndarray, rule: GrammarMask
    ) -> None:
        super().__init__(ops, rows, jobs, partial(rule.bitmask_of, jobs, ignores_eos))
        self._ignores_eos = ignores_eos
        self._rule = rule

    def still_needed(self, token_ids: np.ndarray, certain: np.ndarray, whole: np.ndarray) -> Mask | None:
        before = token_ids[self.rows]
        tokens = np.maximum(before, 0)  # a row without a token stays without one
        is_sure = certain[self.rows]
        if self._ignores_eos.any():
            for token in self._rule.eos_token_ids:
                is_sure &= ~(self._ignores_eos & (tokens == token))
        needs_all = whole[self.rows].tolist()
        chosen, sure, places = tokens.tolist(), is_sure.tolist(), list[int]()
        jobs: list[MaskJob] = []
        for grammar, first, drafts, _ in self.jobs:
            end = first + 1 + len(drafts)
            settled = 0
            if True not in needs_all[first:end]:
                here = chosen[first:end]
                settled = grammar.settle(drafts, here, sure[first:end])
                chosen[first:end] = here
            if first + settled < end:
                jobs.append(MaskJob(grammar, len(places), drafts[settled:], drafts[:settled]))
                places += range(first + settled, end)
        token_ids[self.rows] = np.where(before < 0, before, chosen)
        if not jobs:
            return None
        return LateMask(self.ops, self.rows[places], jobs, self._ignores_eos[places], self._rule)
