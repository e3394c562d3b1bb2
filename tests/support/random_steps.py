"""Random steps, as a scheduler could make them: chunks, drafts, rows that enter, block tables that are cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput

NUM_BLOCKS = 500


@dataclass
class Sequence:
    """A request in a slot; `computed` of its tokens have been scheduled."""

    tokens: list[int]
    num_prompt_tokens: int
    computed: int
    blocks: list[int] = field(default_factory=list)


class RandomSteps:
    """Makes a step at a time; its samples come back before the next one."""

    def __init__(self, rng: random.Random, max_num_seqs: int, max_model_len: int, block_size: int, vocab: int) -> None:
        self.rng, self.max_num_seqs, self.max_model_len, self.block_size = rng, max_num_seqs, max_model_len, block_size
        self.vocab = vocab
        self.live: dict[int, Sequence] = {}
        self._kept: dict[int, int] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def step(self) -> SchedulerOutput:
        out = SchedulerOutput()
        slots = self.rng.sample(range(self.max_num_seqs), self.rng.randint(1, self.max_num_seqs))
        for row, slot in enumerate(slots):
            sequence = self.live.get(slot)
            full = sequence is not None and len(sequence.tokens) >= self.max_model_len - 1
            enters = sequence is None or full or self.rng.random() < 0.15
            if enters:
                self._kept.pop(slot, None)
                sequence = self.live[slot] = self._new()
            assert sequence is not None
            self._schedule(out, row, slot, sequence, enters)
        out.num_kept_blocks, self._kept = self._kept, {}
        out.num_tokens = sum(out.num_scheduled_tokens)
        return out

    def take(self, out: SchedulerOutput, sampled: np.ndarray) -> None:
        """Append the target's tokens [N] up to the first that is not the draft in its place."""
        place = 0
        for row, slot in enumerate(out.slots):
            if not out.samples[row]:
                continue
            drafts = out.draft_token_ids.get(row, [])
            own = sampled[place : place + len(drafts) + 1].tolist()
            place += len(own)
            taken = next((own[: i + 1] for i, draft in enumerate(drafts) if own[i] != draft), own)
            sequence = self.live[slot]
            sequence.tokens += taken
            if drafts:
                sequence.computed = len(sequence.tokens) - 1
                kept = -(-len(sequence.tokens) // self.block_size)
                if kept < len(sequence.blocks):
                    del sequence.blocks[kept:]
                    self._kept[slot] = kept

    def _new(self) -> Sequence:
        count = self.rng.randint(1, self.max_model_len - 1)
        tokens = self.tokens(count)
        return Sequence(tokens, self.rng.randint(1, count), self.rng.choice([0, self.rng.randrange(count)]))

    def _schedule(self, out: SchedulerOutput, row: int, slot: int, sequence: Sequence, enters: bool) -> None:
        first, total = sequence.computed, len(sequence.tokens)
        count = self.rng.choice([total - first, self.rng.randint(1, total - first)])
        samples = first + count == total
        drafts = []
        if samples and self.rng.random() < 0.4:
            drafts = self.tokens(min(self.rng.randint(1, 3), self.max_model_len - 1 - total))
        end = sequence.computed = first + count + len(drafts)
        missing = -(-end // self.block_size) - len(sequence.blocks)
        blocks = [self.rng.randrange(NUM_BLOCKS) for _ in range(max(0, missing))]
        sequence.blocks += blocks
        if enters:
            token_ids = np.array(sequence.tokens, dtype=np.int32).tobytes()
            new = NewRow(slot, slot, 0, token_ids, sequence.num_prompt_tokens, blocks, SamplingParams(), seed=slot)
            out.new_rows.append(new)
        elif blocks:
            out.new_block_ids[slot] = blocks
        if drafts:
            out.draft_token_ids[row] = drafts
        out.slots.append(slot)
        out.num_scheduled_tokens.append(end - first)
        out.num_computed_tokens.append(first)
        out.samples.append(samples)
