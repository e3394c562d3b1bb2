"""A small model that drafts for a large one, with a KV pool of its own.

It computes a request's tokens when it is asked to draft for it, and keeps their keys and values for the next time.
What the target refused is computed again.  Its sampling draws with the request's parameters, seed and positions: where
both models think alike, they choose alike, at any temperature.  No torch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput

__all__ = ["DraftModel", "DraftRunner"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request in the draft model's batch state.

    Attributes:
        num_known: tokens of the request when it was drafted for.
        drafts: tokens drafted behind them.
        num_computed: leading tokens whose keys and values are in the pool, drafted ones included.
    """

    slot: int
    num_known: int = 0
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)

    def learn(self, request: Request) -> None:
        """What was drafted and is right stays computed."""
        right, end = self.num_known, request.num_tokens
        for draft in self.drafts:
            if right == end or request.token_ids[right] != draft:
                break
            right += 1
        self.num_known, self.drafts = end, []
        self.num_computed = min(self.num_computed, right, end - 1)  # the last one's logits are wanted in any case


@dataclass(slots=True)
class _Turn:
    """A request that gets up to `count` drafts in this call."""

    row: _Row
    count: int


class _Info(Protocol):
    max_model_len: int
    num_blocks: int


class DraftRunner(Protocol):
    """Runs the draft model's steps, as `Runner` (engine/core.py) runs the target's, of the same sizes."""

    @property
    def info(self) -> _Info:
        """Facts of its checkpoint."""

    def launch(self, out: SchedulerOutput) -> Any:
        """See `Runner`."""

    def collect(self, ticket: Any) -> StepOutput:
        """See `Runner`."""


class DraftModel:
    """Drafts for several requests at once.

    Args:
        max_num_seqs, max_num_batched_tokens, block_size: that the runner was made with.

    Attributes:
        num_computed: tokens that it computed so far.
    """

    def __init__(self, runner: DraftRunner, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> None:
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._free_slots = list(range(max_num_seqs))
        self._free_blocks = list(range(runner.info.num_blocks))
        self._rows: OrderedDict[Request, _Row] = OrderedDict()  # least recently used first
        self.num_computed = 0

    def draft(self, wanted: Mapping[Request, int]) -> Mapping[Request, list[int]]:
        """Up to so many tokens behind the last known one of each request.

        A request of which more is to be computed than a step may have gets its drafts later.
        """
        turns: dict[Request, _Turn] = {}
        if wanted:
            try:
                self._draft(wanted, turns)
            except Exception:
                for request in wanted:  # nobody knows how far they are computed
                    self.forget(request)
                raise
        return {request: turn.row.drafts for request, turn in turns.items()}

    def forget(self, request: Request) -> None:
        """Free what it keeps of the request, if anything."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free_slots.append(row.slot)
            self._free_blocks += row.block_ids

    def check_integrity(self) -> None:
        """Assert that each slot and block has one place."""
        rows = self._rows.values()
        slots = [*self._free_slots, *(row.slot for row in rows)]
        blocks = [*self._free_blocks, *(block for row in rows for block in row.block_ids)]
        assert len(set(slots)) == len(slots) == self._max_num_seqs
        assert len(set(blocks)) == len(blocks) == self._runner.info.num_blocks
        assert all(row.num_computed <= len(row.block_ids) * self._block_size for row in rows)

    def _draft(self, wanted: Mapping[Request, int], turns: dict[Request, _Turn]) -> None:
        out = SchedulerOutput()
        for request, count in wanted.items():
            count = min(count, self._runner.info.max_model_len - request.num_tokens)
            if count > 0 and out.num_tokens < self._max_tokens:
                self._catch_up(request, count, out, wanted, turns)
        rows = [turn.row for turn in turns.values()]
        self._run(out, rows)
        length = 1
        while live := [turn.row for turn in turns.values() if len(turn.row.drafts) == length < turn.count]:
            out = SchedulerOutput()
            for row in live:
                _add(out, row.slot, 1, row.num_computed, samples=True)
                row.num_computed += 1
            self._run(out, live)
            length += 1

    def _catch_up(
        self,
        request: Request,
        count: int,
        out: SchedulerOutput,
        wanted: Mapping[Request, int],
        turns: dict[Request, _Turn],
    ) -> None:
        """Let a step compute what is new of the request, as far as it has room for that."""
        row = self._rows.get(request) or self._new_row(request, wanted)
        if row is None:
            return
        self._rows.move_to_end(request)
        row.learn(request)
        if not self._reserve(row, request.num_tokens + count - 1, wanted):
            return
        # The row enters anew, with all of its tokens: what was drafted behind them is void.
        tokens = request.token_ids[: request.num_tokens].tobytes()
        entry = request.request_id, request.index, tokens, request.num_prompt_tokens
        out.new_rows.append(NewRow(row.slot, *entry, list(row.block_ids), _plain(request), request.seed))
        missing = request.num_tokens - row.num_computed
        chunk = min(missing, self._max_tokens - out.num_tokens)
        _add(out, row.slot, chunk, row.num_computed, samples=chunk == missing)
        row.num_computed += chunk
        if chunk == missing:
            turns[request] = _Turn(row, count)

    def _new_row(self, request: Request, wanted: Mapping[Request, int]) -> _Row | None:
        if not self._free_slots and not self._evict(wanted):
            return None
        row = self._rows[request] = _Row(self._free_slots.pop())
        return row

    def _reserve(self, row: _Row, num_tokens: int, wanted: Mapping[Request, int]) -> bool:
        """Whether the row has blocks for so many tokens now."""
        need = -(-num_tokens // self._block_size) - len(row.block_ids)
        while need > len(self._free_blocks):
            if not self._evict(wanted):
                return False
        row.block_ids += [self._free_blocks.pop() for _ in range(need)]
        return True

    def _evict(self, wanted: Mapping[Request, int]) -> bool:
        """Forget the request that was drafted for longest ago, unless drafts are wanted for it now."""
        for request in self._rows:
            if request not in wanted:
                self.forget(request)
                return True
        return False

    def _run(self, out: SchedulerOutput, rows: list[_Row]) -> None:
        """One step; each row that samples gets a draft, unless it fails."""
        if not out.slots:
            return
        self.num_computed += out.num_tokens
        result = self._runner.collect(self._runner.launch(out))
        if result.failure:
            _log.warning("a step of the draft model failed: %s", result.failure)
            self._forget_slots(out.slots)
            return
        if result.row_failures:
            self._forget_slots([out.slots[index] for index in result.row_failures])
        by_slot = {row.slot: row for row in rows}
        for index, (slot, token) in enumerate(zip(out.slots, result.token_ids)):
            if out.samples[index] and index not in result.row_failures:
                by_slot[slot].drafts.append(token)

    def _forget_slots(self, slots: Sequence[int]) -> None:
        """Nobody knows what their pages hold after a failure."""
        for request in [request for request, row in self._rows.items() if row.slot in slots]:
            self.forget(request)


def _add(out: SchedulerOutput, slot: int, count: int, computed: int, samples: bool) -> None:
    out.slots.append(slot)
    out.num_scheduled_tokens.append(count)
    out.num_computed_tokens.append(computed)
    out.samples.append(samples)
    out.num_tokens += count


def _plain(request: Request) -> SamplingParams:
    """The request's parameters without what only costs time: a draft is nobody's output."""
    return msgspec.structs.replace(request.params, logprobs=None, prompt_logprobs=None, grammar=None)
