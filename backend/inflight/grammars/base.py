"""The Protocols between engine, sampler and a grammar library.  No torch.

A request asks for a `GrammarSpec`, plain data that crosses processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from inflight.grammars.spec import GrammarSpec

__all__ = ["NO_SEQUENCE", "Grammar", "Grammars", "MaskJob", "SequenceId", "mask_words"]

SequenceId = tuple[int, int]  # request id, index
NO_SEQUENCE: SequenceId = (-1, 0)  # a row that only a runner knows, as in a warm-up


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask with one bit for each token, the first one in the lowest bit."""
    return (vocab_size + 31) // 32


class Grammar(Protocol):
    """One sequence's way through a grammar, which the logits rule and the drafter share.

    Used by one thread at a time: the drafter asks only while no step in flight samples a token of the sequence.

    Attributes:
        num_tokens: output tokens that it has; `advance` is called with the ones behind them.
        error: why it cannot go on: a token that the grammar does not allow, or a limit of the library; "" if it can.
    """

    error: str
    num_tokens: int

    def advance(self, token_ids: Sequence[int]) -> None:
        """The sequence got these tokens, end of sequence included.  Never raises: see `error`."""

    def known(self, draft_token_ids: Sequence[int]) -> list[int]:
        """The tokens that masks would admit alone behind 0, 1, 2 ... of the drafts, up to one that is not the draft."""

    def settle(self, draft_token_ids: Sequence[int], token_ids: list[int], certain: Sequence[bool]) -> int:
        """How many of `token_ids`, chosen behind 0, 1, 2 ... of the drafts, need no mask.

        Tokens behind the first that differs from its draft do not count, and need none.  0 if there is an `error`; a
        token that only a mask tells, as behind the end, needs one.

        Args:
            token_ids: changed in place: where a mask would allow one token only, it is that one.
            certain: of each place, whether its token is still the one with a mask, provided that it is allowed.
        """

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens can follow, up to the first that cannot."""

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that spell what must come next, as the tokenizer would; [] if there is a choice."""


class MaskJob(NamedTuple):
    """Masks for a sequence and its drafts.

    Attributes:
        row: of the first mask; one more for each draft follows.
        draft_token_ids: tokens that can follow; the sequence does not advance.
        behind: tokens that can follow, and that the first mask is behind; the drafts come after them.
    """

    grammar: Grammar
    row: int
    draft_token_ids: Sequence[int]
    behind: Sequence[int] = ()


class Grammars(Protocol):
    """The grammars of one checkpoint's vocabulary."""

    def warm_up(self) -> None:
        """Begin to read the vocabulary, which the first grammar would wait for.  Does not block."""

    def start(self, spec: GrammarSpec) -> None:
        """Compile in the background, unless that was done.  Does not block."""

    def outcome(self, spec: GrammarSpec) -> str | None:
        """ "" once it is compiled; why it is refused, in words for the client; None: not yet.  Does not block."""

    def new(self, spec: GrammarSpec) -> Grammar:
        """A sequence at the start.  Blocks until the grammar is compiled.

        Raises:
            ValueError: it is refused.
        """

    def walk(self, sequence: SequenceId, spec: GrammarSpec) -> Grammar:
        """The way of `sequence`, one object for all who follow it and as long as one of them keeps it; else `new`."""

    def forget(self, sequence: SequenceId) -> None:
        """A sequence of this id starts anew."""

    def fill(self, jobs: Sequence[MaskJob], bitmask: np.ndarray, in_background: bool = True) -> None:
        """Write the masks of all jobs to `bitmask` int32 [rows, mask_words(vocab_size)].

        Rows behind a draft that the grammar refuses, and those of a sequence with an `error`, allow all.

        Args:
            in_background: use other threads, and leave Python's lock alone.
        """
