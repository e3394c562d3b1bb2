"""Rotary embeddings whose frequencies depend on a sequence's length, chosen for each request.

A module of transformers chooses by the largest position that it is called with.  `_RotaryModule` replaces it: it
calls the module once for each choice, with one more position that makes it choose so, and gives each token the result
of its own request's choice.  The result is therefore the module's own, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inflight.attention.base import AttentionMetadata
from inflight.config import ConfigError
from inflight.engine.request_choice import attach_choices
from inflight.engine.rope_scaling import RopeChoice
from inflight.engine.step import SchedulerOutput

__all__ = ["RequestRotary", "attach_request_rotary", "forget_lengths"]


class RequestRotary:
    """A `StepHook`, shared by the rotary modules of a model: the choice for each token of the running step.

    Args:
        choice: how requests choose.
        max_num_seqs, max_num_batched_tokens: sizes of a step.

    Attributes:
        lengths: int32 [max_num_batched_tokens] on the device; the sequence length whose frequencies each token of the
            step takes, void behind the last.  Its address never changes, so that a captured graph can read it.
        candidates: the lengths that can occur in it.
        capturable: whether `candidates` is always the same.
    """

    def __init__(
        self, choice: RopeChoice, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device
    ) -> None:
        self.choice = choice
        self.capturable = not choice.of_each_length
        self.candidates = [choice.limit] if choice.of_each_length else [choice.limit, choice.limit + 1]
        self.lengths = torch.full((max_num_batched_tokens,), choice.limit, dtype=torch.int32, device=device)
        self._of_slot = np.full(max_num_seqs, choice.limit, dtype=np.int32)

    def step(self, out: SchedulerOutput, batch: AttentionMetadata) -> None:
        """Make the step's choices.  The copy is ordered behind the step before, which may still read `lengths`."""
        for row in out.new_rows:
            attached = row.attached or attach_choices([self.choice], row.num_prompt_tokens, row.params.max_tokens)
            self._of_slot[row.slot] = attached.rope_length
        of_row = self._of_slot[out.slots]
        if self.choice.of_each_length:
            self.candidates = sorted(set(of_row.tolist()))
        lengths = torch.from_numpy(np.repeat(of_row, out.num_scheduled_tokens))
        if self.lengths.device.type == "cuda":
            lengths = lengths.pin_memory()
        self.lengths[: len(lengths)].copy_(lengths, non_blocking=True)


class _RotaryModule(nn.Module):
    """In place of a rotary module of transformers: its result, chosen for each token."""

    rope_type = "chosen for each request"

    def __init__(self, module: Any, shared: RequestRotary) -> None:
        super().__init__()
        self.module = module
        self._shared = shared

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """position_ids int64 [1, T]; what the module returns, tensors [1, T, ...]."""
        shared, result = self._shared, None
        own = shared.lengths[: position_ids.shape[-1]]
        for length in shared.candidates:
            found = self._as_if(length, x, position_ids, args, kwargs)
            result = found if result is None else _where(own == length, found, result)
        return result

    def _as_if(self, length: int, x: Tensor, position_ids: Tensor, args: Any, kwargs: Any) -> Any:
        """The module's result for tokens that take the frequencies of `length`; void for others."""
        choice = self._shared.choice
        last = torch.full_like(position_ids[..., :1], length - 1)
        if choice.of_each_length or length == choice.limit:  # nothing behind the end may be seen
            position_ids = position_ids.clamp(max=length - 1)
        positions = torch.cat([position_ids, last], dim=-1)
        if choice.of_each_length:
            _forget(self.module)
        return _map(lambda tensor: tensor[:, :-1], self.module(x, positions, *args, **kwargs))


def _forget(module: Any) -> None:
    module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
    module.max_seq_len_cached = module.original_max_seq_len


def forget_lengths(model: nn.Module) -> None:
    """Undo what the dynamic rotary modules of a model remember of the longest sequence that they have seen."""
    for module in model.modules():
        if any("dynamic" in kind for kind in kinds_of(module).values()) and not isinstance(module.rope_type, dict):
            _forget(module)


def _map(function: Any, result: Any) -> Any:
    return tuple(map(function, result)) if isinstance(result, tuple) else function(result)


def _where(mine: Tensor, found: Any, others: Any) -> Any:
    """`found` for the tokens of `mine`, bool [T]."""
    if isinstance(found, tuple):
        return tuple(_where(mine, part, other) for part, other in zip(found, others))
    return torch.where(mine.view(1, -1, *[1] * (found.dim() - 2)), found, others)


def attach_request_rotary(
    model: nn.Module, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device
) -> RequestRotary | None:
    """Replace the rotary modules of a model that depend on a sequence's length, in place.

    Returns:
        The hook that chooses for them; None if no request can be long enough to depend on it.

    Raises:
        ConfigError: `max_model_len` is beyond a length from which on the model cannot be served.
    """
    found = {name: module for name, module in model.named_modules() if kinds_of(module)}
    limits = {_limit(module, layer_type) for module in found.values() for layer_type in kinds_of(module)}
    if not limits or max_model_len <= min(limits):
        return None
    kinds = {kind for module in found.values() for kind in kinds_of(module).values()}
    nested = any(isinstance(module.rope_type, dict) for module in found.values())
    if len(limits) > 1 or len(kinds) > 1 or (nested and kinds != {"longrope"}):
        raise ConfigError(
            f"max_model_len={max_model_len}: the model's layers change their rotary embedding in different ways "
            f"({', '.join(sorted(kinds))}, beyond {', '.join(map(str, sorted(limits)))} tokens), which is not "
            f"supported; set max_model_len to at most {min(limits)}"
        )
    choice = RopeChoice(limits.pop(), kinds != {"longrope"}, max_model_len)
    shared = RequestRotary(choice, max_num_seqs, max_num_batched_tokens, device)
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _RotaryModule(module, shared))
    return shared


def kinds_of(module: Any) -> dict[str | None, str]:
    """layer type (None: all) -> rope type, for rope types that depend on the sequence's length."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    return {
        layer: kind
        for layer, kind in kinds.items()
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)
    }


def _limit(module: Any, layer_type: str | None) -> int:
    """Longest sequence with the frequencies for short ones."""
    if "dynamic" in kinds_of(module)[layer_type]:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])
