"""One call chooses a token for every row, whatever their parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.candidates import argmax
from inflight.sampling.choose import draw
from inflight.sampling.logprobs import token_logprobs
from inflight.sampling.metadata import SamplerOutput, SampleRow, SamplingMetadata
from inflight.sampling.processors import edit_logits
from inflight.sampling.table import sampling_metadata

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

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have the kernels for logits[R, vocab_size] of `dtype` compiled, so that no request waits for it."""
        if not can_launch(device):
            return
        params = SamplingParams(temperature=1.0, top_k=2, repetition_penalty=2.0)
        row = SampleRow(params, seed=0, position=1, prompt_token_ids=_TOKEN, output_token_ids=_TOKEN[:0])
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        metadata = sampling_metadata([row], vocab_size, device)
        self(logits, metadata)  # penalties are applied to a float32 copy
        metadata.penalties = None
        self(logits, metadata)


_TOKEN = np.zeros(1, dtype=np.int32)


def _choose(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    if metadata.edits_logits:
        logits = edit_logits(logits, metadata)
    greedy = metadata.greedy_rows
    if greedy is None:
        return argmax(logits)
    if can_launch(logits.device):
        from inflight.kernels.gpu import gpu_sampler

        return gpu_sampler.choose(logits, metadata)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(greedy):
        token_ids[greedy] = argmax(logits[greedy])
    for group in metadata.random_groups:
        token_ids[group.rows] = draw(logits, group)
    return token_ids
