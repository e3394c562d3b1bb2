"""The sequences of the check at load: short, and uneven enough that what looks across requests shows.

A request's neighbours must not matter, nor where its prompt is cut into chunks.  A dependence on a position beyond
some limit is found without computing that many tokens: a test sequence can *start* at a high position, since
positions are an input of the model, while its keys and values are those of its own few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Case", "blocks_of", "cases", "has_experts", "position_limits", "that_fit"]

SHORT, LONG = 7, 12
_MAX_LIMITS = 3


@dataclass(frozen=True)
class Case:
    """One test sequence.

    Attributes:
        token_ids: its tokens.
        first_position: of the first of them.
    """

    token_ids: list[int]
    first_position: int = 0

    @property
    def end(self) -> int:
        return self.first_position + len(self.token_ids)

    @property
    def place(self) -> tuple[int, int]:
        """The first position, and the one behind the last."""
        return self.first_position, self.end


def cases(
    vocab_size: int, max_model_len: int, limits: list[int], window: int | None, budget: int, repeats: int = 1
) -> list[Case]:
    """A short sequence at the start and a longer one at the very end; and one across each limit.

    Args:
        limits: positions from which on the model can compute something else.
        window: tokens of the smallest window.
        budget: tokens that one sequence may have to reach past a window.
        repeats: sequences of other tokens at each place; the first of each come first.
    """
    longest = max(1, max_model_len - 1)  # the KV of a request's very last token is never computed
    length = LONG
    if window is not None and window + LONG <= min(budget, longest):
        length = window + LONG
    short, length = min(SHORT, longest), min(length, longest)
    places = [(short, 0), (length, longest - length)]
    places += [(LONG, limit - LONG // 2) for limit in limits[:_MAX_LIMITS] if LONG <= limit < longest - LONG]
    return [
        Case(np.random.default_rng(seed).integers(0, vocab_size, size).tolist(), first)
        for seed, (size, first) in enumerate(places * repeats)
    ]


def blocks_of(case: Case, block_size: int) -> int:
    """Blocks that its own tokens take: the positions before it have none."""
    return -(-len(case.token_ids) // block_size)


def that_fit(found: list[Case], num_blocks: int, block_size: int) -> list[Case]:
    """As many of the sequences as a pool holds together, those in front first; the first one cut, if need be."""
    fitting: list[Case] = []
    for case in found:
        need = blocks_of(case, block_size)
        if need <= num_blocks:
            fitting.append(case)
            num_blocks -= need
    return fitting or [Case(found[0].token_ids[: num_blocks * block_size], found[0].first_position)]


def has_experts(text_config: Any) -> bool:
    """Whether config.json names a number of experts; a router chooses some of them for each token."""
    return any(
        "experts" in name and isinstance(value, int) and value > 1 for name, value in text_config.to_dict().items()
    )


def position_limits(text_config: Any) -> list[int]:
    """Every length that config.json names, of positions, windows and chunks; those of a first training come first."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    entries = [item for values in (text_config.to_dict(), rope, *nested) for item in values.items()]
    words = ("position", "window", "chunk_size", "seq_len")
    named = [
        ("original" not in name, value)
        for name, value in entries
        if isinstance(value, int) and value > 1 and any(word in name for word in words)
    ]
    return list(dict.fromkeys(value for _, value in sorted(named)))
