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
    """

    def __init__(self, top: int) -> None:
        self._top = top
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
            token = first_text
            if row:
                chosen = next(iter(row.values()))
                token = chosen.decoded_token or ""
                logprobs.append(max(chosen.logprob, _LOWEST))
                candidates.append(self._candidates(row))
            else:
                logprobs.append(None)
                candidates.append(None)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": candidates, "text_offset": offsets}

    def _candidates(self, row: dict[int, Any]) -> dict[str, float]:
        """The most likely tokens and the chosen one, by their text."""
        entries = list(row.values())[: self._top + 1]
        return {entry.decoded_token or "": max(entry.logprob, _LOWEST) for entry in entries}


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
