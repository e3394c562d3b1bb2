"""Log probabilities of tokens under the raw logits, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inflight.engine.messages import TokenLogprobs
from inflight.sampling.candidates import top_candidates

__all__ = ["prompt_logprobs", "token_logprobs"]

# Bound on the entries of what is worked on at once.
_CHUNK = 2**20


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, top: int) -> list[TokenLogprobs]:
    """Entries of the prompt tokens that P positions predict.

    Args:
        logits: [P, V], float32 or bfloat16.
        next_token_ids: int[P], the prompt token after each position.
        top: how many of the most likely tokens follow in each entry.

    Returns:
        P entries: the prompt token, then the `top` most likely by falling log probability.
    """
    return token_logprobs(logits, next_token_ids, [top] * len(logits))


def token_logprobs(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Entries for `token_ids[P]` under `logits[P, V]`: the token, then its row's `tops[i]` top ones.

    The rank of a token is 1 plus the number of tokens with a strictly greater logit.
    """
    step = max(1, _CHUNK // logits.shape[-1])
    entries: list[TokenLogprobs] = []
    for i in range(0, len(logits), step):
        entries += _chunk_logprobs(logits[i : i + step], token_ids[i : i + step], tops[i : i + step])
    return entries


def _chunk_logprobs(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, token_ids.long().unsqueeze(-1))
    ranks = ((logits > own).sum(-1) + 1).tolist()
    own_logprobs = (own - normaliser).flatten().tolist()
    entries: list[TokenLogprobs] = [[entry] for entry in zip(token_ids.tolist(), own_logprobs, ranks)]
    if top := max(tops):
        values, ids = top_candidates(logits, top)
        # Equal logits share the rank of the first of them.
        top_ranks = (values.unsqueeze(-1) < values.unsqueeze(-2)).sum(-1) + 1
        rows = zip(ids.tolist(), (values - normaliser).tolist(), top_ranks.tolist())
        for entry, keep, row in zip(entries, tops, rows):
            entry += list(zip(*row))[:keep]
    return entries
