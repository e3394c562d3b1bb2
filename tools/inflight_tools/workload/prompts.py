"""Prompts with exact token counts, as token ids."""

from __future__ import annotations

import numpy as np

from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.scenarios import Job

__all__ = ["HASH_BLOCK", "IdPrompts"]

_FIRST_ID = 300  # above the special and byte tokens of the tokenizers that these loads use
HASH_BLOCK = 512


class IdPrompts:
    """Random token ids below `vocab_size`; requests share prefixes only where a trace says so."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        if vocab_size < 2:
            raise WorkloadError(f"vocab_size {vocab_size}: must be at least 2")
        self._low = _FIRST_ID if vocab_size > 2 * _FIRST_ID else 1
        self._high, self._seed = vocab_size, seed

    def make(self, job: Job) -> list[int]:
        """Exactly `job.prompt_tokens` ids; equal hash ids give equal blocks of 512 tokens."""
        if not job.hash_ids:
            return self._draw([self._seed, job.index, 1], job.prompt_tokens)
        ids: list[int] = []
        for block in job.hash_ids:
            ids += self._draw([self._seed, block, 2], HASH_BLOCK)
        ids += self._draw([self._seed, job.index, 3], max(0, job.prompt_tokens - len(ids)))
        return ids[: job.prompt_tokens]

    def _draw(self, key: list[int], count: int) -> list[int]:
        return np.random.default_rng(key).integers(self._low, self._high, count).tolist()
