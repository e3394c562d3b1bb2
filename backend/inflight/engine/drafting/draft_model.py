"""A small model that drafts for a large one, with a KV pool of its own.

It computes a request's tokens when asked to draft for it, and keeps their keys and values for the next time.
Tokens that the target refused are computed again.  It samples with the request's parameters, seed and positions:
where both models agree, they choose the same tokens at any temperature.  No torch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inflight.engine.drafting.drafter import Guess
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.request_choice import RequestChoice, attach_choices
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput

__all__ = ["DraftModel", "DraftRunner", "ModelGuesser"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request in the draft model's batch state.

    Attributes:
        kv: its blocks in the draft model's pool, and how many leading tokens are computed, drafted ones included.
        num_known: tokens that the request had at its last draft.
        drafts: tokens drafted after them.
    """

    slot: int
    kv: Request
    num_known: int = 0
    drafts: list[int] = field(default_factory=list)

    def learn(self, request: Request) -> None:
        """Compare the drafts with the request's new tokens; correct drafts stay computed."""
        right, end = self.num_known, request.num_tokens
        for draft in self.drafts:
            if right == end or request.token_ids[right] != draft:
                break
            right += 1
        self.num_known, self.drafts = end, []
        # The last token is always computed, for its logits.
        self.kv.num_computed_tokens = min(self.kv.num_computed_tokens, right, end - 1)


@dataclass(slots=True)
class _Turn:
    """A request that gets up to `count` drafts in this call to `draft`."""

    row: _Row
    count: int


class _Info(Protocol):
    max_model_len: int
    num_blocks: int
    choices: list[RequestChoice]


class DraftRunner(Protocol):
    """Runs the draft model's steps, with the limits of the target's, as `Runner` (engine/core.py) runs those."""

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
        max_num_seqs, max_num_batched_tokens, block_size: as the runner has them.

    Attributes:
        pool: of its KV blocks; their requests are the draft model's own.
        num_computed: tokens computed so far.
    """

    def __init__(self, runner: DraftRunner, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> None:
        self._runner = runner
        self.max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs))
        self.pool = KVPool(runner.info.num_blocks, block_size)
        self._rows: OrderedDict[Request, _Row] = OrderedDict()  # least recently used first
        self.num_computed = 0

    def draft(self, wanted: Mapping[Request, int]) -> Mapping[Request, list[int]]:
        """Up to so many tokens after the last known one of each request.

        A request with more tokens to compute than fit a step gets its drafts later.
        """
        turns: dict[Request, _Turn] = {}
        if wanted:
            try:
                self._draft(wanted, turns)
            except Exception:
                for request in wanted:  # how far they are computed is unknown
                    self.forget(request)
                raise
        return {request: turn.row.drafts for request, turn in turns.items()}

    def forget(self, request: Request) -> None:
        """Free the request's slot and blocks, if it has any."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free_slots.append(row.slot)
            self.pool.release(row.kv)

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
                _add(out, row, 1, samples=True)
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
        """Schedule the request's new tokens, as many as the step has room for."""
        row = self._rows.get(request) or self._new_row(request, wanted)
        if row is None:
            return
        self._rows.move_to_end(request)
        row.learn(request)
        while self.pool.extend(row.kv, request.num_tokens + count - 1) is None:
            if not self._evict(wanted):
                return
        # The row enters again with all of its tokens: earlier drafts after them are invalid.
        tokens = request.token_ids[: request.num_tokens].tobytes()
        entry = request.request_id, request.index, tokens, request.num_prompt_tokens
        params = _plain(request)
        attached = attach_choices(self._runner.info.choices, request.num_prompt_tokens, params.max_tokens)
        out.new_rows.append(NewRow(row.slot, *entry, list(row.kv.block_ids), params, request.seed, attached))
        missing = request.num_tokens - row.kv.num_computed_tokens
        chunk = min(missing, self._max_tokens - out.num_tokens)
        _add(out, row, chunk, samples=chunk == missing)
        if chunk == missing:
            turns[request] = _Turn(row, count)

    def _new_row(self, request: Request, wanted: Mapping[Request, int]) -> _Row | None:
        if not self._free_slots and not self._evict(wanted):
            return None
        longest = self._runner.info.max_model_len + 1
        kv = Request(request.request_id, (), request.params, index=request.index, max_total_tokens=longest)
        row = self._rows[request] = _Row(self._free_slots.pop(), kv)
        return row

    def _evict(self, wanted: Mapping[Request, int]) -> bool:
        """Forget the request that was drafted for longest ago, except those in `wanted`; False if there is none."""
        for request in self._rows:
            if request not in wanted:
                self.forget(request)
                return True
        return False

    def _run(self, out: SchedulerOutput, rows: list[_Row]) -> None:
        """Run one step; each row that samples gets a draft, unless it fails."""
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
        """Forget requests after a failure: the contents of their blocks are unknown."""
        for request in [request for request, row in self._rows.items() if row.slot in slots]:
            self.forget(request)


def _add(out: SchedulerOutput, row: _Row, num_tokens: int, samples: bool) -> None:
    """Schedule the row's next tokens."""
    out.append(row.slot, num_tokens, row.kv.num_computed_tokens, samples)
    row.kv.num_computed_tokens += num_tokens


def _plain(request: Request) -> SamplingParams:
    """The request's parameters without the parts that only cost time: drafts are not output."""
    return msgspec.structs.replace(request.params, logprobs=None, prompt_logprobs=None, grammar=None)


class ModelGuesser:
    """Implements `Guesser`: the first request that asks in a step makes the model run for all of the step."""

    computes = True

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._running: Sequence[Request] = ()
        self._hope: Callable[[Request], int] = lambda request: 0
        self._drafts: Mapping[Request, Sequence[int]] | None = None

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        self._running, self._hope, self._drafts = running, hope, None

    def guess(self, request: Request, limit: int) -> Guess | None:
        if self._drafts is None:
            self._drafts = {}  # if the model raises, it does not run again in this step
            self._drafts = self._model.draft(self._wanted())
        tokens = list(self._drafts.get(request, ()))[:limit]
        return Guess(tokens, [1.0] * len(tokens), 0) if tokens else None

    def ended(self, request: Request) -> None:
        self._model.forget(request)

    def _wanted(self) -> dict[Request, int]:
        """Requests that sample in this step, with the tokens to draft; the step is complete except for its drafts."""
        wanted = {}
        for request in self._running:
            hoped = self._hope(request) if request.num_computed_tokens >= request.num_tokens else 0
            if hoped:
                wanted[request] = hoped + request.num_total_tokens - 1 - request.num_tokens
        return wanted
