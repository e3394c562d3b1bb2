"""Tokens that a grammar forces need no logits: their rows are computed like those of a prompt.

A mask would admit one token in their places, so the head, and the rest of the last layer, run for the other places
only.  Log probabilities are of logits: a row that wants them keeps all of its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from inflight.device.batch_state import BatchState, StepInputs
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput
from inflight.grammars.base import Grammar, Grammars

__all__ = ["ForcedRows", "ForcedTokens"]


@dataclass(slots=True)
class ForcedTokens:
    """The tokens of a step that are known before its forward pass.

    Attributes:
        out: the step without the drafts that they confirm.
        tokens: row -> its first tokens.
        has_drafts: the rows among them with drafts in the step itself.
    """

    out: SchedulerOutput
    tokens: dict[int, list[int]] = field(default_factory=dict)
    has_drafts: set[int] = field(default_factory=set)

    def completed(self, step: StepOutput) -> StepOutput:
        """Put them before the sampled tokens of `step`, the result of `out`.  Rows that failed stay as they are."""
        for row, tokens in self.tokens.items():
            if row in step.row_failures:
                continue
            last = step.token_ids[row]
            tokens = [*tokens, *step.token_runs.get(row, (last,) if last >= 0 else ())]
            if row in self.has_drafts:
                step.token_ids[row], step.token_runs[row] = -1, tokens
            else:
                (step.token_ids[row],) = tokens
        return step


class ForcedRows:
    """Follows the slots whose requests have a grammar and want no log probabilities.

    Args:
        grammars: of the checkpoint, if any; the logits rule shares each sequence's way through them.
        state: has the tokens of the slots.
    """

    def __init__(self, grammars: Grammars | None, state: BatchState) -> None:
        self._grammars = grammars
        self._state = state
        self._of_slot: dict[int, Grammar] = {}

    def fill_rows(self, rows: Sequence[NewRow], faulty: Container[int] = ()) -> None:
        """Take the grammars of rows that enter, behind the logits rules.

        Args:
            faulty: places in `rows` whose parameters a rule could not take: they fail, whatever tokens they get.
        """
        for place, row in enumerate(rows):
            self._of_slot.pop(row.slot, None)
            spec = row.params.grammar
            if spec is not None and row.params.logprobs is None and self._grammars is not None and place not in faulty:
                self._of_slot[row.slot] = self._grammars.walk((row.request_id, row.index), spec)

    def split(self, out: SchedulerOutput, inputs: StepInputs) -> tuple[StepInputs, ForcedTokens]:
        """The inputs without logits for tokens that are known, and these; call `fill_rows` first.

        Such drafts are certain to be confirmed: from here on they are tokens of their sequences.  A step can be split
        again, whole or in parts.
        """
        forced = ForcedTokens(out)
        if not self._of_slot:
            return inputs, forced
        kept = np.ones(len(inputs.row_of_logits), dtype=bool)
        drafts_left = dict(out.draft_token_ids)
        for row, slot in enumerate(out.slots):
            grammar = self._of_slot.get(slot)
            if grammar is None or not out.samples[row]:
                continue
            drafts = out.draft_token_ids.get(row, [])
            start = out.num_computed_tokens[row] + out.num_scheduled_tokens[row] - len(drafts)
            tokens = self._known(grammar, slot, start, drafts)
            if not tokens:
                continue
            forced.tokens[row] = tokens
            if drafts:
                forced.has_drafts.add(row)
            first, count = int(np.searchsorted(inputs.row_of_logits, row)), len(tokens)
            drafts_left.pop(row, None)
            if tokens != drafts[:count]:  # nothing counts behind them
                self._state.token_ids[slot, start + count - 1] = tokens[-1]
                count = len(drafts) + 1
            elif count < len(drafts):
                drafts_left[row] = drafts[count:]
            kept[first : first + count] = False
        if not forced.tokens:
            return inputs, forced
        forced.out = msgspec.structs.replace(out, draft_token_ids=drafts_left)
        rows, indices = inputs.row_of_logits[kept], inputs.logits_indices[kept]
        places = inputs.slot_of_token, inputs.position_of_token
        return StepInputs(*places, rows, indices, inputs.positions, inputs.metadata), forced

    def _known(self, grammar: Grammar, slot: int, start: int, drafts: list[int]) -> list[int]:
        """The tokens from position `start` on that the grammar forces, up to one behind the drafts."""
        end = int(self._state.num_prompt_tokens[slot]) + grammar.num_tokens
        if end < start:
            grammar.advance(self._state.token_ids[slot, end:start].tolist())
            end = start
        confirmed = drafts[: end - start]  # when the step was split before
        return [*confirmed, *grammar.known(drafts[len(confirmed) :])]
