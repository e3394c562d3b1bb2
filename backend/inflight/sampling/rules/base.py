"""The Protocol of a logits rule, and what rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.ops import SamplingOps

__all__ = ["BannedTokens", "LogitsEdit", "LogitsMask", "LogitsRule", "Put", "RowBatch", "check_token_ids"]

# Brings an array to the device, where it has its contents by the time that an edit is applied.
Put = Callable[[np.ndarray], Tensor]


@dataclass(slots=True)
class RowBatch:
    """The r rows of one sampling call that a rule acts on; arrays on the host.

    A slot with draft tokens has several rows, consecutive and at increasing positions.  Its tokens
    before `first_positions` are final.  The tokens from there on are drafts: the next call can have
    other tokens in their place, so a rule can look at them but must not remember them.

    Attributes:
        rows: int64[r], rows of the logits, increasing.
        slots: int64[r], slot of each row.
        positions: int64[r], number of tokens before the one to sample.
        first_positions: int64[r], position of the first row of the same slot.
        num_prompt_tokens: int64[r], where the output starts in the row's tokens.
        token_ids: int[max_num_seqs, n], the tokens of each slot, prompt first, valid up to the row's
            position.  Empty for a rule that does not read tokens, if the caller passed none.
        put: brings an edit's arrays to the device.
        ops: of the device, for edits that kernels apply.
        history: int32[slots, n] on the device, the same as `token_ids` when an edit is applied; None if the caller
            keeps none there.
    """

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    first_positions: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids: np.ndarray
    put: Put
    ops: SamplingOps
    history: Tensor | None

    def take(self, indices: np.ndarray) -> RowBatch:
        """The rows at `indices`, int64[s]."""
        return RowBatch(
            self.rows[indices],
            self.slots[indices],
            self.positions[indices],
            self.first_positions[indices],
            self.num_prompt_tokens[indices],
            self.token_ids,
            self.put,
            self.ops,
            self.history,
        )


class LogitsEdit(Protocol):
    """A change to the logits of one sampling call; its tensors are on the device already."""

    def apply(self, logits: Tensor) -> None:
        """Change float32 logits[R, V], contiguous, in place and without waiting for the device."""


class LogitsMask(LogitsEdit, Protocol):
    """An edit that other rules cannot undo, and that log probabilities follow.

    Attributes:
        rows: int64 [r], rows of the logits, increasing.
        failures: row of the logits -> why no token of it can be meant; complete once there is a `bitmask`.
    """

    rows: np.ndarray
    failures: dict[int, str]

    def bitmask(self) -> np.ndarray:
        """int32 [r, mask_words(V)] for `rows`, on the host; waits for it."""

    def still_needed(self, token_ids: np.ndarray, certain: np.ndarray, whole: np.ndarray) -> LogitsMask | None:
        """The part of this mask that is still needed once tokens were chosen without it; it costs less than the whole.

        Args:
            token_ids: int64[R], on the host; changed in place where the mask leaves one token.
            certain: bool[R], rows whose token is still the one with the mask, provided that it is allowed.
            whole: bool[R], rows whose mask is needed in any case.

        Returns:
            The mask of the rows that need it after all; all of it where it is being made already.
        """


class LogitsRule(Protocol):
    """One kind of constraint or preference: its parameters and state for every slot of a table.

    The table calls `set_row` when a request enters a slot and `prepare` once per sampling call, for
    all rows at once.  State that follows the output (counts, a grammar's automaton) is advanced in
    `prepare`: by then the tokens before `RowBatch.first_positions` are accepted.

    Attributes:
        is_mask: whether `prepare` returns a `LogitsMask`.
        reads_tokens: whether `prepare` reads `RowBatch.token_ids`.  A runner that keeps sampled tokens on the device
            then waits for them; `RowBatch.history`, which edits can read, costs no wait.
        warm_up_params: parameters that activate the rule, for a vocabulary of any size; it is run
            with them before the first request, so that its kernels are compiled.
    """

    is_mask: ClassVar[bool]
    reads_tokens: ClassVar[bool]
    warm_up_params: ClassVar[SamplingParams]

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """
        Args:
            max_num_seqs: number of slots.
            vocab_size: V, the last dimension of the logits.
            device: where the logits are.
        """

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        """Replace the slot's contents; returns whether the rule acts on this request at all.

        Args:
            sequence: the one that enters the slot.

        Raises:
            ValueError: a token id that would be written to is outside the vocabulary.
        """

    def prepare(self, batch: RowBatch) -> LogitsEdit | None:
        """The edit for these rows; `set_row` returned True for each.  None if nothing changes.

        No Python loop runs over rows x tokens.
        """


@dataclass(slots=True)
class BannedTokens:
    """Masked (row, token) pairs.

    Attributes:
        index: int64[N], row * V + token id; pairs can repeat.
    """

    index: Tensor

    def apply(self, logits: Tensor) -> None:
        logits.view(-1).index_fill_(0, self.index, float("-inf"))


def check_token_ids(name: str, token_ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size): as flat indices they would reach into another row."""
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{name}: token id {outside[0]} is not in the vocabulary [0, {vocab_size - 1}]")
