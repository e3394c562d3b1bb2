"""Log probabilities as OpenAI's chats have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight_client import Logprob
from inflight_client.results import TokenLogprobs

__all__ = ["chat_logprobs"]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int, ids_as_tokens: bool = False
) -> list[dict[str, Any]]:
    """An entry per token, each with the `top` most likely ones.

    Args:
        token_ids: the chosen ones.
        logprobs: candidates for each token, including the chosen one.
        ids_as_tokens: `token` is "token_id:5" in the place of the text.
    """
    pairs = zip(token_ids, logprobs, strict=False)
    return [_entry(token_id, candidates or {}, top, ids_as_tokens) for token_id, candidates in pairs]


def _entry(token_id: int, candidates: dict[int, Logprob], top: int, ids_as_tokens: bool) -> dict[str, Any]:
    best = sorted(candidates.items(), key=lambda one: (one[1].rank or 0, -one[1].logprob))[:top]
    chosen = candidates.get(token_id) or Logprob(logprob=-9999.0)
    entry = _token(token_id, chosen, ids_as_tokens)
    return {**entry, "top_logprobs": [_token(*one, ids_as_tokens) for one in best]}


def _token(token_id: int, one: Logprob, ids_as_tokens: bool) -> dict[str, Any]:
    text = one.decoded_token or ""
    token = f"token_id:{token_id}" if ids_as_tokens else text
    return {"token": token, "logprob": one.logprob, "bytes": list(text.encode("utf-8", "replace"))}
