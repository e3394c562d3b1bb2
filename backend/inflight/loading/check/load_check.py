"""The check at load: the paged, ragged forward pass computes the same logits as transformers' attention.

An architecture can bypass the attention interface with a feature that paging would silently drop (a positional
bias, state shared between layers, a mask), or look across requests (a maximum over positions).  A few sequences
(`check_cases.py`), split into chunks and run as one batch through the pool, are compared with transformers' eager
attention on each alone.  In half precision this is done twice:

    structure   in float32, with the definition of paged attention: what the model computes
    rounding    as it is served, within a few times the error that transformers' own half precision makes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.base import AttentionBackend
from inflight.attention.hf import IMPLEMENTATION
from inflight.attention.reference import ReferenceAttention
from inflight.device.step_hook import StepHook
from inflight.load_phases import enter_phase
from inflight.loading.check.cases import Case, blocks_of, that_fit
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.forward.rotary import forget_lengths
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.quantization.in_float32 import InFloat32

__all__ = ["EXACT", "LoadCheck", "Reference", "reference", "relative_error", "tolerance"]

EXACT = 1e-3  # relative error that rounding explains in float32; a dropped feature costs far more

# The same for the storage of keys and values: int8 costs about 1% (measured on every architecture), several times that
# with outliers; fp8 rounds each number by up to 6%.
_KV_TOLERANCE = {torch.int8: 0.1, torch.float8_e4m3fn: 0.25}
_UNCHECKED_TOLERANCE = 0.25  # in half precision, where nothing tells how far its own rounding goes
_OWN_ERRORS, _LEAST = 3.0, 0.005  # in half precision: multiples of transformers' own error, and what is always allowed


@dataclass(frozen=True)
class Reference:
    """The results of transformers.

    Attributes:
        cases: the sequences.
        logits: float32 [length, V] of each alone.
        own_error: relative error of transformers in the model's dtype, where sequences are longest; 0 in float32; None:
            unknown.
    """

    cases: list[Case]
    logits: list[Tensor]
    own_error: float | None = 0.0

    @property
    def is_exact(self) -> bool:
        return self.own_error == 0.0

    def first(self, cases: list[Case]) -> Reference:
        """The same, restricted to `cases`."""
        kept = [(case, logits) for case, logits in zip(self.cases, self.logits) if case in cases]
        return replace(self, cases=[case for case, _ in kept], logits=[logits for _, logits in kept])


def tolerance(expected: Reference | None, kv_dtype: torch.dtype | None, of_weights: float) -> float:
    """Largest relative error of a right forward pass; `of_weights` is what their storage explains."""
    own = 0.0 if expected is None else expected.own_error
    rounding = _UNCHECKED_TOLERANCE if own is None else _OWN_ERRORS * own + _LEAST if own else EXACT
    return max(rounding, _KV_TOLERANCE.get(kv_dtype, 0.0) if kv_dtype else 0.0, of_weights)


@dataclass(frozen=True)
class LoadCheck:
    """Tells whether a forward pass of the loaded model is right.

    Attributes:
        model_type: of the checkpoint, for messages.
        expected: the results of transformers' attention; None accepts everything.
        tolerance: largest relative error of the logits.
        hooks: are called before the forward pass of each step.
        limits: lengths that config.json names, in tokens.
    """

    model_type: str
    backend: AttentionBackend
    expected: Reference | None
    tolerance: float
    block_size: int
    device: torch.device
    hooks: Sequence[StepHook] = ()
    limits: tuple[int, ...] = ()

    def passes(self, forward: Callable[..., Any]) -> bool:
        enter_phase("checking the logits")
        return self.error(forward) <= self.tolerance

    def error(self, forward: Callable[..., Any]) -> float:
        """Its relative error, over the first blocks of the present pool."""
        if self.expected is None:
            return 0.0
        return relative_error(forward, self.backend, self.expected, self.block_size, self.device, self.hooks)

    def structure_error(self, model: nn.Module, layers: PagedLayers) -> float:
        """The error in float32 of transformers' modules, as loaded, with the definition of paged attention."""
        if self.expected is None or self.expected.own_error is None:
            return 0.0
        num_blocks = sum(blocks_of(case, self.block_size) for case in self.expected.cases)
        exact = replace(self.expected, own_error=0.0)
        with layers.standing_in(ReferenceAttention(), num_blocks, torch.float32) as backend, InFloat32():
            return relative_error(model, backend, exact, self.block_size, self.device, self.hooks)

    def up_to(self, limit: int) -> LoadCheck | None:
        """The same with the sequences that end at `limit` or before; None if these are all of them, or none."""
        cases = [] if self.expected is None else [case for case in self.expected.cases if case.end <= limit]
        if self.expected is None or len(cases) in (0, len(self.expected.cases)):
            return None
        return replace(self, expected=self.expected.first(cases))

    def that_fits(self, num_blocks: int) -> LoadCheck:
        """The same in a pool of `num_blocks`, with the sequences that fit it."""
        if self.expected is None:
            return self
        cases = that_fit(self.expected.cases, num_blocks, self.block_size)
        return replace(self, expected=self.expected.first(cases))


@torch.inference_mode()
def reference(model: nn.Module, cases: list[Case], device: torch.device, widens: bool = False) -> Reference:
    """Run the sequences, each alone, through eager attention.

    Args:
        widens: run in float32, though weights are in half precision, and tell how far off half precision is.
    """
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        if not widens:
            is_float32 = next(model.parameters()).dtype == torch.float32
            return Reference(cases, _logits(model, cases, device), 0.0 if is_float32 else None)
        with InFloat32():
            exact = _logits(model, cases, device)
        place = max((case.place for case in cases), key=lambda place: place[1] - place[0])
        longest = [index for index, case in enumerate(cases) if case.place == place]
        rounded = _logits(model, [cases[index] for index in longest], device)
    finally:
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return Reference(cases, exact, min(map(_typical_error, rounded, (exact[index] for index in longest))))


def _logits(model: nn.Module, cases: list[Case], device: torch.device) -> list[Tensor]:
    """float32 logits [length, V] of each; those at the same place in one batch without padding, alone in all else."""
    found: dict[int, Tensor] = {}
    for place in dict.fromkeys(case.place for case in cases):
        indices = [index for index, case in enumerate(cases) if case.place == place]
        token_ids = torch.tensor([cases[index].token_ids for index in indices], device=device)
        forget_lengths(model)
        positions = torch.arange(*place, device=device)[None].expand_as(token_ids)
        logits = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits.float()
        found.update(zip(indices, logits))
    return [found[index] for index in range(len(cases))]


def _whole_error(logits: Tensor, right: Tensor) -> float:
    return ((logits - right).norm() / right.norm().clamp_min(1e-9)).nan_to_num(nan=torch.inf).item()


def _typical_error(logits: Tensor, right: Tensor) -> float:
    """The relative error that three quarters of the tokens do not exceed."""
    errors = (logits - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-9)
    return errors.nan_to_num(nan=torch.inf).quantile(0.75, interpolation="lower").item()


@torch.inference_mode()
def relative_error(
    model: Callable[..., Any],
    backend: AttentionBackend,
    expected: Reference,
    block_size: int,
    device: torch.device,
    hooks: Sequence[StepHook] = (),
) -> float:
    """Largest relative error of the paged logits over the sequences; beside rounding, over their places.

    Half precision can change the choice of an expert, on either side, and with it all logits of a token and of the
    tokens that attend to it.  That spoils one sequence; a wrong forward pass spoils all at a place.  So the best one
    counts.

    Writes to the first blocks of the pool: only before the first request, with cases that fit.
    """
    paged = paged_logits(model, backend, expected.cases, block_size, device, hooks)
    if expected.is_exact:
        return max(map(_whole_error, paged, expected.logits))
    best: dict[tuple[int, int], float] = {}
    for case, logits, right in zip(expected.cases, paged, expected.logits):
        best[case.place] = min(best.get(case.place, torch.inf), _typical_error(logits, right))
    return max(best.values())
