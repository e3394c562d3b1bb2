"""One call chooses a token for every row, whatever their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.sampling.candidates import largest, largest_values
from inflight.sampling.choose import draw
from inflight.sampling.late_masks import mask_where_needed
from inflight.sampling.metadata import SamplerOutput, SamplingMetadata
from inflight.sampling.rules import LogitsEdit
from inflight.sampling.token_logprobs import token_logprobs
from inflight.sampling.unusable import are_finite, mark_unusable

__all__ = ["Sampler", "edit_logits"]


class Sampler:
    """Stateless: a row's token depends only on its logits, params, seed, position and tokens."""

    @torch.no_grad()
    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for each row of `logits[R, V]` (float32, bfloat16 or float16; left unchanged).

        A row whose logits cannot be sampled from (`unusable.py`) gets `NO_TOKEN`.

        Raises:
            ValueError: `metadata` is for another number of rows or another vocabulary.
        """
        expected = metadata.num_rows, metadata.vocab_size or logits.shape[-1]
        if logits.shape != expected:
            raise ValueError(
                f"logits have shape {list(logits.shape)}, metadata is for {list(expected)}: "
                "select the slots whose rows are passed, from a table with the vocabulary size of the logits"
            )
        if metadata.masks:
            token_ids, masked, failures = _choose_masked(logits, metadata)
        else:
            token_ids, masked, failures = _choose(logits, metadata, logits), logits, {}
        index = metadata.logprobs_rows
        if index is None:
            return SamplerOutput(token_ids, [], None, failures)
        rows, tops = list(metadata.logprobs), list(metadata.logprobs.values())
        chosen = token_ids[index].clamp_(min=0)
        return SamplerOutput(token_ids, rows, token_logprobs(masked[index], chosen, tops), failures)


def edit_logits(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """float32[R, V]: a copy of `logits` with the edits of `metadata` applied in their order.

    Where they leave none of the tokens that the masks allow (`logits` are masked), the masks decide alone.
    """
    edited = _edited(logits, metadata.edits)
    if not metadata.masks:
        return edited
    return torch.where(edited.amax(-1, keepdim=True) == -torch.inf, logits, edited)


def _edited(logits: Tensor, edits: Sequence[LogitsEdit]) -> Tensor:
    edited = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for edit in edits:
        edit.apply(edited)
    return edited


def _choose_masked(logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor, dict[int, str]]:
    """int64[R], the masked logits of all rows that return log probabilities, and the masks' failures."""
    if metadata.edits or len(metadata.masks) > 1 or not metadata.ops.draws_masked:
        masked = _edited(logits, metadata.masks)
        failures = {row: reason for mask in metadata.masks for row, reason in mask.failures.items()}
        return _choose(masked, metadata, logits), masked, failures
    token_ids = _choose(logits, metadata, logits)
    return mask_where_needed(logits, token_ids, metadata)


def _choose(logits: Tensor, metadata: SamplingMetadata, of_model: Tensor) -> Tensor:
    """int64[R].  A row is unusable by the model's own logits: a mask neither hides NaN nor is taken for it."""
    if metadata.edits:
        logits = edit_logits(logits, metadata)
    suspect = logits is not of_model
    if metadata.columns is not None and metadata.ops.draws:
        token_ids = metadata.ops.choose(logits, metadata.columns, not suspect)
        return mark_unusable(token_ids, largest_values(of_model)) if suspect else token_ids
    greedy = metadata.greedy_rows
    if greedy is None:
        tops, token_ids = largest(logits)
        return mark_unusable(token_ids, largest(of_model)[0] if suspect else tops)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(greedy):
        tops, token_ids[greedy] = largest(logits[greedy])
        suspect |= not are_finite(tops)
    for group in metadata.random_groups:
        token_ids[group.rows], tops = draw(logits, group)
        suspect |= not are_finite(tops)
    return mark_unusable(token_ids, largest(of_model)[0]) if suspect else token_ids
