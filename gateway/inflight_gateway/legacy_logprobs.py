"""`logprobs` as `/v1/completions` returns them: four lists with one entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight_client.results import TokenLogprobs

__all__ = ["LegacyLogprobs", "first_token_text", "vllm_logprobs"]

_LOWEST = -9999.0  # JSON has no infinity; vLLM's floor


class LegacyLogprobs:
    """Creates the lists of one choice, chunk by chunk.

    Args:
        top: requested number of candidates per token.
        ids_as_tokens: tokens are named "token_id:5" in the place of their text.
    """

    def __init__(self, top: int, ids_as_tokens: bool = False) -> None:
        self._top = top
        self._ids_as_tokens = ids_as_tokens
        self._offset = 0

    def add(self, rows: Sequence[TokenLogprobs], first_text: str = "") -> dict[str, Any]:
        """The lists of the next tokens; `text_offset` continues.

        Args:
            rows: candidates of each token, itself first; None for the first token of a prompt.
            first_text: text of a token without candidates.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        candidates: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row in rows:
            token = name = first_text
            if row:
                chosen_id, chosen = next(iter(row.items()))
                token = chosen.decoded_token or ""
                name = self._name(chosen_id, token)
                logprobs.append(max(chosen.logprob, _LOWEST))
                candidates.append(self._candidates(row))
            else:
                logprobs.append(None)
                candidates.append(None)
            tokens.append(name)
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": candidates, "text_offset": offsets}

    def _candidates(self, row: dict[int, Any]) -> dict[str, float]:
        """The most likely tokens and the chosen one, by their text."""
        entries = list(row.items())[: self._top + 1]
        return {
            self._name(token_id, entry.decoded_token or ""): max(entry.logprob, _LOWEST) for token_id, entry in entries
        }

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._ids_as_tokens else text


def first_token_text(rows: Sequence[TokenLogprobs], text: str) -> str:
    """The text of a prompt's first token, which has no candidates: the prompt without the texts of the others."""
    rest = "".join(next(iter(row.values())).decoded_token or "" for row in rows if row)
    return text.removesuffix(rest) if text.endswith(rest) else ""


def vllm_logprobs(rows: Sequence[TokenLogprobs] | None) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM returns them: candidates by token id."""
    if rows is None:
        return None
    return [
        {
            str(token_id): {
                "logprob": max(entry.logprob, _LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in row.items()
        }
        if row
        else None
        for row in rows
    ]
