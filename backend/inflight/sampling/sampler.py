"""One call chooses a token for every row, whatever their parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.sampling.candidates import argmax
from inflight.sampling.choose import draw
from inflight.sampling.logprobs import token_logprobs
from inflight.sampling.metadata import SamplerOutput, SamplingMetadata
from inflight.sampling.processors import edit_logits

__all__ = ["Sampler"]


class Sampler:
    """Stateless: a row's token depends on its logits, params, seed, position and tokens alone."""

    @torch.no_grad()
    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for each row of `logits[R, V]` (float32, bfloat16 or float16; not changed).

        Raises:
            ValueError: `metadata` is for another number of rows or another vocabulary.
        """
        expected = metadata.num_rows, metadata.vocab_size or logits.shape[-1]
        if logits.shape != expected:
            raise ValueError(
                f"logits have shape {list(logits.shape)}, metadata is for {list(expected)}: "
                "select the slots whose rows are passed, from a table made with the logits' vocabulary"
            )
        output = SamplerOutput(_choose(logits, metadata))
        if metadata.logprobs:
            rows = list(metadata.logprobs)
            index = torch.tensor(rows, device=logits.device)
            tops = list(metadata.logprobs.values())
            output.logprobs = dict(zip(rows, token_logprobs(logits[index], output.token_ids[index], tops)))
        return output


def _choose(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    if metadata.edits_logits:
        logits = edit_logits(logits, metadata)
    greedy = metadata.greedy_rows
    if greedy is None:
        return argmax(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(greedy):
        token_ids[greedy] = argmax(logits[greedy])
    for group in metadata.random_groups:
        token_ids[group.rows] = draw(logits, group)
    return token_ids
