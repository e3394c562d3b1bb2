"""The check at load: the paged, ragged forward pass computes the same logits as transformers' attention.

An architecture may bypass the attention interface with a feature that paging would silently drop (a positional
bias, state shared between layers, a mask).  Two short sequences, split into chunks and run as one batch through
the pool, are compared with transformers' eager attention on each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inflight.attention.base import AttentionBackend, forward_context
from inflight.attention.hf import IMPLEMENTATION
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.runner.batch_state import BatchState

__all__ = ["LoadCheck", "Reference", "lengths_that_fit", "num_check_blocks", "reference", "relative_error", "tolerance"]

_LENGTHS = (7, 12)
_CHUNKS = (4, 64)  # tokens of each sequence in the first and the second step

# Relative error of the logits that rounding explains: in half precision it may change the choice of experts.  A
# dropped positional bias or a leak between sequences costs far more.  int8 keys and values cost about 1% (measured on
# every architecture), several times that with outliers; fp8 rounds each number by up to 6%.
_TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.25,
    torch.int8: 0.1,
    torch.float8_e4m3fn: 0.25,
}
# The same with linear layers in eight bits.  In int8 they are compared with plain ones; in fp8 with the same ones under
# transformers' attention: inputs on the edge between two roundings differ (2 to 13%, measured on two layers of every
# architecture and on 32 layers of large random weights).
_WEIGHTS_TOLERANCE = {None: 0.0, "int8": 0.25, "fp8": 0.3}


@dataclass(frozen=True)
class Reference:
    """Sequences of token ids, and transformers' float32 logits [length, V] of each."""

    sequences: list[list[int]]
    logits: list[Tensor]


def lengths_that_fit(max_len: int, num_blocks: int, block_size: int) -> list[int]:
    """Lengths of the test sequences: two that fit the pool together, or one if it has a single block."""
    limit = min(max_len, max(1, num_blocks // len(_LENGTHS)) * block_size)
    lengths = [min(length, limit) for length in _LENGTHS]
    return lengths if num_blocks >= len(lengths) else lengths[-1:]


def num_check_blocks(block_size: int) -> int:
    """Blocks of a pool that holds the test sequences at their full lengths."""
    return len(_LENGTHS) * -(-max(_LENGTHS) // block_size)


def tolerance(dtype: torch.dtype, kv_dtype: torch.dtype | None, weights: str | None) -> float:
    """Largest relative error of a right forward pass; `weights` is "int8", "fp8", or None for weights in `dtype`."""
    return max(_TOLERANCE[dtype], _TOLERANCE[kv_dtype or dtype], _WEIGHTS_TOLERANCE[weights])


@dataclass(frozen=True)
class LoadCheck:
    """Tells whether a forward pass of the loaded model is right.

    Attributes:
        model_type: of the checkpoint, for messages.
        expected: what transformers' attention computed; None accepts everything.
        tolerance: largest relative error of the logits.
    """

    model_type: str
    backend: AttentionBackend
    expected: Reference | None
    tolerance: float
    block_size: int
    device: torch.device

    def passes(self, forward: Callable[..., Any]) -> bool:
        return self.error(forward) <= self.tolerance

    def error(self, forward: Callable[..., Any]) -> float:
        """Its relative error, over the first blocks of the present pool."""
        if self.expected is None:
            return 0.0
        return relative_error(forward, self.backend, self.expected, self.block_size, self.device)

    def that_fits(self, num_blocks: int) -> LoadCheck:
        """The same in a pool of `num_blocks`, which holds the longest of the sequences in any case."""
        if self.expected is None:
            return self
        sequences, logits = self.expected.sequences, self.expected.logits
        if num_blocks >= len(sequences) * -(-max(map(len, sequences)) // self.block_size):
            return self
        return replace(self, expected=Reference(sequences[-1:], logits[-1:]))


@torch.inference_mode()
def reference(model: nn.Module, vocab_size: int, lengths: Sequence[int], device: torch.device) -> Reference:
    """Run random sequences of these lengths, each alone, through eager attention."""
    sequences = [np.random.default_rng(seed).integers(0, vocab_size, n).tolist() for seed, n in enumerate(lengths)]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        logits = [
            model(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits[0].float()
            for sequence in sequences
        ]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return Reference(sequences, logits)


@torch.inference_mode()
def relative_error(
    model: Callable[..., Any], backend: AttentionBackend, expected: Reference, block_size: int, device: torch.device
) -> float:
    """Largest relative error (Frobenius norm) of the paged logits over the sequences.

    Writes to the first blocks of the pool: only before the first request, with `lengths_that_fit`.
    """
    paged = _paged_logits(model, backend, expected.sequences, block_size, device)
    errors = [
        ((logits - right).norm() / right.norm().clamp_min(1e-9)).item() for logits, right in zip(paged, expected.logits)
    ]
    return max(errors)


def _paged_logits(
    model: Callable[..., Any],
    backend: AttentionBackend,
    sequences: list[list[int]],
    block_size: int,
    device: torch.device,
) -> list[Tensor]:
    """float32 logits [length, V] of each sequence, computed as one batch in two chunks."""
    num_blocks = -(-max(map(len, sequences)) // block_size)
    state = BatchState(len(sequences), num_blocks * block_size, block_size, device)
    rows = [
        NewRow(
            slot,
            request_id=slot,
            index=0,
            token_ids=np.array(sequence, dtype=np.int32).tobytes(),
            num_prompt_tokens=len(sequence),
            block_ids=list(range(slot * num_blocks, (slot + 1) * num_blocks)),
            params=SamplingParams(),
            seed=0,
        )
        for slot, sequence in enumerate(sequences)
    ]
    computed = [0] * len(sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for chunk in _CHUNKS:
        counts = [min(chunk, len(sequence) - done) for sequence, done in zip(sequences, computed)]
        slots = [slot for slot, count in enumerate(counts) if count]
        if not slots:
            break
        out = SchedulerOutput(
            slots=slots,
            num_scheduled_tokens=[counts[slot] for slot in slots],
            num_computed_tokens=[computed[slot] for slot in slots],
            samples=[False] * len(slots),
            new_rows=rows,
            num_tokens=sum(counts),
        )
        state.apply(out)
        state.fill_rows(out)
        rows = []
        inputs = state.step_inputs(out)
        with forward_context(inputs.metadata, backend):
            result = model(input_ids=state.input_ids(inputs), position_ids=inputs.positions, use_cache=False)
        query_start_loc = inputs.metadata.query_start_loc_cpu
        for row, slot in enumerate(slots):
            parts[slot].append(result.logits[0, query_start_loc[row] : query_start_loc[row + 1]].float())
            computed[slot] += counts[slot]
    return [torch.cat(part) for part in parts]
