"""Log probabilities of tokens under the raw logits, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.engine.logprobs import Logprobs
from inflight.sampling.candidates import top_candidates

__all__ = ["PendingLogprobs", "prompt_logprobs", "token_logprobs"]

# Number of logits worked on at once: a bound on memory.
_CHUNK = 2**20


class PendingLogprobs:
    """Log probabilities of P tokens on their way from the device to the host; made by `token_logprobs`.

    Args:
        chunks: token ids (int32), log probabilities (float32) and ranks (int32) of consecutive
            tokens, each [p, 1 + k] on the device: the token itself, then the top k.
        tops: how many of the top k each token keeps.
    """

    def __init__(self, chunks: list[tuple[Tensor, Tensor, Tensor]], tops: Sequence[int]) -> None:
        self._sizes = 1 + np.array(tops, dtype=np.int64)
        # From a GPU these are copies into pinned memory, complete when the event is.
        self._chunks = [[tensor.to("cpu", non_blocking=True) for tensor in chunk] for chunk in chunks]
        self._copied = None
        if chunks and chunks[0][0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def take(self) -> Logprobs:
        """Those of all tokens; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        parts, start = [], 0
        for chunk in self._chunks:
            arrays = [tensor.numpy() for tensor in chunk]
            end, width = start + len(arrays[0]), arrays[0].shape[1]
            sizes = np.minimum(self._sizes[start:end], width)
            if sizes.min() < width:
                kept = np.arange(width) < sizes[:, None]
                arrays = [array[kept] for array in arrays]
            parts.append(Logprobs(sizes.tolist(), *(array.tobytes() for array in arrays)))
            start = end
        return Logprobs.joined(parts)


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, top: int) -> Logprobs:
    """Log probabilities of the prompt tokens that P positions predict.

    Args:
        logits: [P, V], float32, bfloat16 or float16.
        next_token_ids: int[P], the prompt token after each position.
        top: number of most likely tokens beside each prompt token.
    """
    return token_logprobs(logits, next_token_ids, [top] * len(logits)).take()


def token_logprobs(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> PendingLogprobs:
    """Those of `token_ids[P]` under `logits[P, V]`: of the token, then of the `tops[i]` most likely of row i.

    The rank of a token is 1 plus the number of tokens with a strictly greater logit.
    """
    step = max(1, _CHUNK // logits.shape[-1])
    chunks = [
        _chunk_logprobs(logits[i : i + step], token_ids[i : i + step], max(tops[i : i + step]))
        for i in range(0, len(logits), step)
    ]
    return PendingLogprobs(chunks, tops)


def _chunk_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    ids = token_ids.long().unsqueeze(-1)
    values = logits.gather(-1, ids)
    ranks = (logits > values).sum(-1, keepdim=True) + 1
    if top:
        top_values, top_ids = top_candidates(logits, top)
        # Equal logits share the rank of the first of them.
        places = torch.arange(1, top_values.shape[-1] + 1, device=logits.device).expand_as(top_ids)
        repeats = torch.nn.functional.pad(top_values[:, 1:] == top_values[:, :-1], (1, 0))
        top_ranks = places.masked_fill(repeats, 1).cummax(-1).values
        ids = torch.cat([ids, top_ids], dim=-1)
        values = torch.cat([values, top_values], dim=-1)
        ranks = torch.cat([ranks, top_ranks], dim=-1)
    return ids.int(), values - normaliser, ranks.int()
