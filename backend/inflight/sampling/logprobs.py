"""Log probabilities of tokens under the raw logits, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.engine.messages import TokenLogprobs
from inflight.sampling.candidates import top_candidates

__all__ = ["PendingLogprobs", "prompt_logprobs", "token_logprobs"]

# Number of logits worked on at once: a bound on memory.
_CHUNK = 2**20


class PendingLogprobs:
    """Entries of P tokens on their way from the device to the host; made by `token_logprobs`.

    Args:
        chunks: token ids (int64), log probabilities (float32) and ranks (int64) of consecutive
            tokens, each [p, 1 + k] on the device: the token itself, then the top k.
        tops: how many of the top k each token's entry keeps.
    """

    def __init__(self, chunks: list[tuple[Tensor, Tensor, Tensor]], tops: Sequence[int]) -> None:
        self._tops = tops
        # From a GPU these are copies into pinned memory, complete when the event is.
        self._chunks = [[tensor.to("cpu", non_blocking=True) for tensor in chunk] for chunk in chunks]
        self._copied = None
        if chunks and chunks[0][0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def entries(self) -> list[TokenLogprobs]:
        """One entry per token; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = (row for chunk in self._chunks for row in zip(*(tensor.tolist() for tensor in chunk)))
        return [list(zip(*(column[: 1 + top] for column in row))) for row, top in zip(rows, self._tops)]


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, top: int) -> list[TokenLogprobs]:
    """Entries of the prompt tokens that P positions predict.

    Args:
        logits: [P, V], float32, bfloat16 or float16.
        next_token_ids: int[P], the prompt token after each position.
        top: number of most likely tokens in each entry.

    Returns:
        P entries: the prompt token, then the `top` most likely by falling log probability.
    """
    return token_logprobs(logits, next_token_ids, [top] * len(logits)).entries()


def token_logprobs(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> PendingLogprobs:
    """Entries for `token_ids[P]` under `logits[P, V]`: the token, then the `tops[i]` most likely of row i.

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
    return ids, values - normaliser, ranks
