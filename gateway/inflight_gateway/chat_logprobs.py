"""Log probabilities as OpenAI's chats have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight_client import Logprob
from inflight_client.results import TokenLogprobs

__all__ = ["chat_logprobs"]


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """An entry per token, each with the `top` most likely ones.

    Args:
        token_ids: the chosen ones.
        logprobs: candidates for each token, including the chosen one.
    """
    return [_entry(token_id, candidates or {}, top) for token_id, candidates in zip(token_ids, logprobs, strict=False)]


def _entry(token_id: int, candidates: dict[int, Logprob], top: int) -> dict[str, Any]:
    best = sorted(candidates.values(), key=lambda one: (one.rank or 0, -one.logprob))[:top]
    chosen = candidates.get(token_id) or Logprob(logprob=-9999.0)
    return {**_token(chosen), "top_logprobs": [_token(one) for one in best]}


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": one.logprob, "bytes": list(text.encode("utf-8", "replace"))}
