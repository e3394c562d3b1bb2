"""Adapters (LoRA) in memory, and the ones of a step's rows.

An adapter is named by its content (`AdapterRef.id`).  It is loaded in a thread of its own while requests with it are
held; at most `max_cpu_loras` are in memory.  One that sequences run with stays; of the others the ones used last stay.
On a GPU those of at most `max_loras` run at the same time.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from inflight.adapters.spec import AdapterError, read_adapter
from inflight.attention.base import AttentionMetadata
from inflight.byte_sizes import format_bytes
from inflight.config import ConfigError, EngineConfig
from inflight.engine.adapter import AdapterRef, Leaving, Outcome
from inflight.engine.adapter_salt import AdapterSalt
from inflight.engine.step import SchedulerOutput
from inflight.loading.adapter_weights import adapter_matrices
from inflight.loading.check.cases import Case
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.forward.adapted_model import AdaptedModel, adapted_model
from inflight.loading.loaded_model import LoadedModel
from inflight.runner.adapter_loader import LoaderPace, LoaderThread

__all__ = ["AdapterRows", "AdapterTable", "attach_adapters"]

_log = logging.getLogger(__name__)

# Seconds that an unused adapter stays after a request asked about it: it waits for a slot or for blocks.
_RECENT = 0.5
# Seconds that it counts as its tenant's place in memory.
_COUNTED = 60.0
# Seconds after which requests that wait for room make another adapter's requests wait; then one more's, as often.
_PATIENCE = 2.0
# Seconds after which a request that asked for room no longer counts: others go before it.  Longer than any step.
_NOT_NEXT = 30.0
# Seconds after which a slot that was promised to an adapter goes to another one, unless a request asked again.
_PROMISED = 2.0
_MAX_FAILURES = 1024  # remembered
# Seconds before requests with an adapter that could not be loaded make the loader try again.
_RETRY = 5.0


@dataclass(eq=False)
class Entry:
    """One adapter in memory, or on its way there.

    Attributes:
        packed: for `AdaptedModel.set_rows`, once it is loaded.
        loaded: done when `packed` is there; its result is the answer to `LoadAdapter`.
        num_held: requests that have begun with it, and not ended.
        asked, admitted: when a request last asked about it, and last started with it; seconds.
    """

    ref: AdapterRef
    packed: Any = None
    loaded: Future[dict[str, Any]] = field(default_factory=Future)
    num_held: int = 0
    asked: float = 0.0
    admitted: float = 0.0


class Promise(NamedTuple):
    """A slot for an adapter.

    Attributes:
        asked: when one of its requests asked last; seconds.
        request: the one of them that goes first.
        request_asked: when that one asked last; it can have ended since.
    """

    asked: float
    request: Any
    request_asked: float


class AdapterTable:
    """Implements `Adapters`.  Only `_load` runs in the loader's thread.

    Args:
        model: packs what is loaded.
        limit: most adapters in memory.
        max_rank: a larger one is refused.
        max_running: most adapters that requests run with at the same time; None: all in memory.
        pace: of loads, if steps compute on the cores that the loader needs, too.
        clock: seconds.
    """

    def __init__(
        self,
        model: AdaptedModel,
        limit: int,
        max_rank: int,
        max_running: int | None = None,
        pace: LoaderPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._limit, self._max_rank, self._max_running = limit, max_rank, max_running or limit
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # by id; the one that was asked about last is last
        self._failures: OrderedDict[str, tuple[str, float]] = OrderedDict()  # by id: the reason, and when
        self._waiting: dict[str, tuple[float, float]] = {}  # id without room -> first and last time it was asked for
        self._promised: dict[str, Promise] = {}  # by id of an adapter that got a slot, and has no request running
        self._goes_before: Callable[[Any, Any], bool] = lambda request, other: False
        self._leaving: Leaving = lambda adapter_ids, request, impatient: adapter_ids
        self._pace, self._loader = pace, LoaderThread(pace)

    def get(self, adapter_id: str) -> Entry | None:
        """The entry of a loaded adapter."""
        entry = self._entries.get(adapter_id)
        return entry if entry is not None and entry.packed is not None else None

    def reset(
        self,
        goes_before: Callable[[Any, Any], bool],
        leaving: Leaving = lambda adapter_ids, request, impatient: adapter_ids,
    ) -> None:
        self._goes_before, self._leaving = goes_before, leaving
        for entry in self._entries.values():
            entry.num_held = 0
        self._waiting.clear()
        self._promised.clear()

    def load_of(self, ref: AdapterRef) -> Future[dict[str, Any]] | None:
        entry = self._entries.get(ref.id)
        return None if entry is None else entry.loaded

    def start(self, ref: AdapterRef, request: Any = None) -> None:
        if self._clock() - self._failures.get(ref.id, ("", 0.0))[1] >= _RETRY:
            self._failures.pop(ref.id, None)
        if ref.id in self._failures:
            return
        # Without room it waits only once it is next: one far back in the queue must not stop those before it.
        now = self._clock()
        if ref.id in self._entries:
            self._touch(self._entries[ref.id], now)
        elif self._evict(now, request):
            self._touch(self._begin(ref), now)

    def outcome(self, ref: AdapterRef, request: Any, begun: bool) -> Outcome:
        failure = self._failures.get(ref.id)
        if failure is not None:
            return Outcome(False, failure[0])
        now = self._clock()
        entry = self._entries.get(ref.id)
        if entry is None:
            if not self._make_room(ref.id, now, request):
                return Outcome(False)
            entry = self._begin(ref)
        self._touch(entry, now)
        if not entry.loaded.done():
            return Outcome(False)
        error = entry.loaded.exception()
        if error is not None:
            self._fail(ref.id, str(error))
            return Outcome(False, str(error))
        if begun:
            return Outcome(True)
        if entry.num_held:
            return Outcome(entry not in self._draining(now))
        return Outcome(self._take_slot(ref.id, now, request))

    def hold(self, ref: AdapterRef) -> None:
        entry = self._entries[ref.id]
        entry.num_held += 1
        entry.admitted = self._clock()
        self._waiting.pop(ref.id, None)
        self._promised.pop(ref.id, None)

    def release(self, ref: AdapterRef) -> None:
        self._entries[ref.id].num_held -= 1

    def forget(self, ref: AdapterRef) -> None:
        self._waiting.pop(ref.id, None)
        self._promised.pop(ref.id, None)

    def step_done(self, seconds: float, num_running: int) -> None:
        if self._pace is not None:
            self._pace.step_done(seconds, num_running)

    def load(self, ref: AdapterRef) -> Future[dict[str, Any]]:
        entry = self._entries.get(ref.id)
        if entry is not None and entry.loaded.done() and entry.loaded.exception() is not None:
            del self._entries[ref.id]
            entry = None
        if entry is None:
            self._failures.pop(ref.id, None)
            if self._evict(self._clock(), None):
                entry = self._begin(ref)
            else:  # it is checked, and loaded again for the first request that finds room
                entry = Entry(ref)
                self._submit(entry)
        found: Future[dict[str, Any]] = Future()
        entry.loaded.add_done_callback(lambda done: _answer(found, done, ref.name))
        return found

    def _begin(self, ref: AdapterRef) -> Entry:
        entry = self._entries[ref.id] = Entry(ref)
        self._waiting.pop(ref.id, None)
        self._submit(entry)
        return entry

    def _touch(self, entry: Entry, now: float) -> None:
        """A request has asked about it."""
        entry.asked = now
        self._entries.move_to_end(entry.ref.id)

    def _take_slot(self, adapter_id: str, now: float, request: Any) -> bool:
        """Whether a loaded adapter without requests may run; else its request waits for a slot.

        A free slot is promised to one adapter.  Were all that wait ready, their requests would return to the queue, and
        all but one would be held again, with new deadlines.  A request that goes before the one that has the promise,
        and that lacks blocks perhaps, takes it.
        """
        promised = {
            key: promise
            for key, promise in self._promised.items()
            if key in self._entries and now - promise.asked < _PROMISED
        }
        self._promised = promised
        num_running = sum(1 for entry in self._entries.values() if entry.num_held)
        if adapter_id not in promised and num_running + len(promised) >= self._max_running:
            key = next((key for key, held in promised.items() if self._goes_before(request, held.request)), None)
            if key is None:
                self._wait(adapter_id, now)
                return False
            del promised[key]
        first, asked = request, now
        if adapter_id in promised:
            _, other, other_asked = promised[adapter_id]
            if now - other_asked < _PROMISED and self._goes_before(other, request):
                first, asked = other, other_asked
        promised[adapter_id] = Promise(now, first, asked)
        return True

    def _submit(self, entry: Entry) -> None:
        self._loader.submit(partial(self._load, entry))

    def _load(self, entry: Entry) -> None:
        ref, start = entry.ref, self._clock()
        try:
            content = read_adapter(ref, self._max_rank, self._loader.pause)
            packed = self._model.pack(adapter_matrices(ref.name, content, self._model.layers), self._loader.pause)
        except AdapterError as error:
            entry.loaded.set_exception(error)
        except BaseException as error:
            _log.error("adapter %r cannot be loaded", ref.name, exc_info=error)
            reason = f"adapter {ref.name!r}: internal error while it was loaded: {type(error).__name__}: {error}"
            entry.loaded.set_exception(AdapterError(reason))
        else:
            waited, modules, size = self._loader.waited, len(content.pairs), format_bytes(packed.nbytes)
            seconds = self._clock() - start - waited
            text = "adapter %r: rank %d, %s, in %.2f s of work and %.2f s of waits for running requests"
            _log.info(text, ref.name, ref.rank, size, seconds, waited)
            entry.packed = packed
            entry.loaded.set_result({"bytes": packed.nbytes, "modules": modules, "seconds": seconds, **_facts(ref)})

    def _fail(self, adapter_id: str, reason: str) -> None:
        del self._entries[adapter_id]
        self._failures[adapter_id] = reason, self._clock()
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _make_room(self, adapter_id: str, now: float, request: Any) -> bool:
        """Whether one more adapter may be loaded; else a request waits for room for it."""
        if self._evict(now, request, impatient=now - self._first_asked(adapter_id, now) >= _PATIENCE):
            return True
        self._wait(adapter_id, now)
        return False

    def _wait(self, adapter_id: str, now: float) -> None:
        """A request that is next, or was held, finds no room or no slot."""
        self._waiting[adapter_id] = self._first_asked(adapter_id, now), now

    def _first_asked(self, adapter_id: str, now: float) -> float:
        """When its requests began to wait."""
        first, last = self._waiting.get(adapter_id, (now, now))
        return first if now - last < _NOT_NEXT else now

    def _evict(self, now: float, request: Any, impatient: bool = False) -> bool:
        """Drop an adapter, if all places are taken: the one that was used least recently, unless `_leaving` differs.

        Of those asked for within a minute it takes the ones that `request` may take; more of them if it is impatient.

        Returns:
            Whether there is a place.
        """
        if len(self._entries) < self._limit:
            return True
        idle = {
            key
            for key, entry in self._entries.items()
            if entry.num_held == 0 and entry.loaded.done() and (impatient or now - entry.asked >= _RECENT)
        }
        order = [key for key in self._leaving(list(self._entries), None, False) if key in idle]
        unused = [key for key in order if now - self._entries[key].asked >= _COUNTED]
        if not unused:
            order = [key for key in self._leaving(list(self._entries), request, impatient) if key in idle]
        if not order:
            return False
        del self._entries[unused[0] if unused else order[0]]
        return True

    def _draining(self, now: float) -> list[Entry]:
        """Adapters that start no more requests, because requests of others have waited too long for room.

        They grow in number, since the requests of the first ones may be the longest.
        """
        longest = max((now - first for first, last in self._waiting.values() if now - last < _NOT_NEXT), default=0.0)
        if longest < _PATIENCE:
            return []
        held = sorted((entry for entry in self._entries.values() if entry.num_held), key=lambda entry: entry.admitted)
        return held[: int(longest / _PATIENCE)]


class AdapterRows:
    """A `StepHook`: tells the model which adapter each row of the step has."""

    def __init__(self, table: AdapterTable, model: AdaptedModel) -> None:
        self._table, self._model = table, model
        self.capturable = model.capturable
        self._adapted: set[int] = set()  # slots with adapters, as of the step that was launched last
        self._of_slot: dict[int, Entry | None] = {}  # slots with adapters; None: it is not in memory

    def adapts(self, out: SchedulerOutput) -> bool:
        """Whether rows of the step have adapters; called for each step on a GPU when it is launched, in order."""
        for row in out.new_rows:
            has_one = row.attached is not None and row.attached.adapter is not None
            (self._adapted.add if has_one else self._adapted.discard)(row.slot)
        return bool(self._adapted) and not self._adapted.isdisjoint(out.slots)

    def expect(self, num_tokens: int) -> None:
        """See `AdaptedModel.expect`."""
        self._model.expect(num_tokens)

    def step(self, out: SchedulerOutput, batch: AttentionMetadata) -> None:
        if out.new_rows:  # so it is no part of a step that raised, which lacks other rows
            self._forget_ended(out)
        for row in out.new_rows:
            self._of_slot.pop(row.slot, None)
            if row.attached is not None and row.attached.adapter is not None:
                self._of_slot[row.slot] = self._table.get(row.attached.adapter.id)
        if not self._of_slot:
            self._model.set_rows([], [])
            return
        entries = [self._of_slot.get(slot, _BASE) for slot in out.slots]
        if None in entries:
            raise RuntimeError("the adapter of this request is not in memory")
        self._model.set_rows([entry.packed for entry in entries if entry is not None], out.num_scheduled_tokens)

    def _forget_ended(self, out: SchedulerOutput) -> None:
        """Rows that have ended keep no adapter in memory; one that has just ended can be in a step made ahead."""
        slots = set(out.slots)
        for slot, entry in list(self._of_slot.items()):
            if slot not in slots and (entry is None or not entry.num_held):
                del self._of_slot[slot]


_BASE = Entry(AdapterRef("", "", "", 0))


def attach_adapters(config: EngineConfig, loaded: LoadedModel) -> list[AdapterRows]:
    """The step hook for adapters, if the options ask for it; `loaded.info` gets the table and its salts.

    Raises:
        ConfigError: they cannot be served in the dtype that was asked for.
        LoadError: they cannot be served with this checkpoint, or on this device.
    """
    if not config.enable_lora:
        return []
    model = adapted_model(config, loaded.model, loaded.dtype, loaded.device, lambda: _run_a_few(config, loaded))
    loaded.adapter_bytes = model.nbytes
    own = str(model.dtype).removeprefix("torch.")
    if config.lora_dtype not in ("auto", own):
        raise ConfigError(
            f"lora_dtype={config.lora_dtype!r}: adapters have the dtype of the model, which is {own!r}; set lora_dtype "
            f'to "auto", or dtype to {config.lora_dtype!r}'
        )
    pace = LoaderPace(lambda: loaded.info.tiers is not None and bool(loaded.info.tiers.loads))
    on_cores = loaded.device.type == "cpu"
    sizes = config.num_kept_adapters, config.max_lora_rank, model.max_adapters
    table = AdapterTable(model, *sizes, pace if on_cores else None)
    loaded.info.adapters = table
    loaded.info.choices = [*loaded.info.choices, AdapterSalt()]
    return [AdapterRows(table, model)]


def _run_a_few(config: EngineConfig, loaded: LoadedModel) -> int:
    """One pass of the model over a few tokens, in the first blocks of the pool."""
    case = Case([0, 1, 2], 0)
    paged_logits(loaded.model, loaded.backend, [case], config.block_size, loaded.device, loaded.hooks)
    return len(case.token_ids)


def _facts(ref: AdapterRef) -> dict[str, Any]:
    return {"name": ref.name, "id": ref.id, "rank": ref.rank}


def _answer(found: Future[dict[str, Any]], done: Future[dict[str, Any]], name: str) -> None:
    error = done.exception()
    if error is not None:
        found.set_exception(error)
    else:
        found.set_result({**done.result(), "name": name})
