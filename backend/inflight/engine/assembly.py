"""Builds an engine core: the scheduler, policies and limits that the options choose.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore, EngineParts, Runner
from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.deadline_admission import AdmissionRecord
from inflight.engine.policies.load_shedding import LoadShedding
from inflight.engine.policies.selection import make_policies, make_swap
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.queue_limits import QueueLimits
from inflight.engine.scheduler import Scheduler, SchedulerLimits
from inflight.engine.tiers.loads import Loads
from inflight.engine.tiers.tiered_pool import TieredPool

__all__ = ["Recorder", "make_core", "make_parts"]


class Recorder(Protocol):
    """Makes pools that tell what their prefix caches have, each with a listener: `kv_events.KVEvents`."""

    def pool(self, num_blocks: int, block_size: int) -> tuple[KVPool, EngineListener]:
        """Arguments as for `KVPool`."""

    def tiered_pool(
        self, num_blocks: int, block_size: int, longest: int, reserved: Collection[int]
    ) -> tuple[TieredPool, EngineListener]:
        """Arguments as for `TieredPool`."""

    def totals(self) -> tuple[int, int]:
        """Batches so far, and how many more were dropped."""


def make_core(
    config: EngineConfig,
    runner: Runner,
    clock: Callable[[], float] = time.monotonic,
    listeners: Iterable[EngineListener] = (),
    recorder: Recorder | None = None,
) -> EngineCore:
    """An engine with these options on `runner`; the same in-process, served and simulated.

    Args:
        clock: see `EngineCore`.
        listeners: see `EngineCore`.
        recorder: is told what the prefix cache has; None: nothing is.
    """
    return EngineCore(config, runner, make_parts(config, runner, clock, recorder), clock, listeners)


def make_parts(
    config: EngineConfig,
    runner: Runner,
    clock: Callable[[], float] = time.monotonic,
    recorder: Recorder | None = None,
) -> EngineParts:
    """The parts of `EngineCore`; limits and shedding listen to the scheduler's events."""
    info, loads = runner.info, None
    accounts, record = TenantAccounts(config), AdmissionRecord()
    sizes = info.num_blocks, config.block_size
    if info.tiers is None:
        pool, recorded = (KVPool(*sizes), None) if recorder is None else recorder.pool(*sizes)
    else:
        info.tiers.num_pools += 1
        room = *sizes, info.max_model_len + 1, info.tiers.reserved  # with the void token of a pooled request
        pool, recorded = (TieredPool(*room), None) if recorder is None else recorder.tiered_pool(*room)
        loads = Loads(info.tiers, pool, clock)
    drafts = runner.draft_runner
    policies = make_policies(
        config, clock, info.grammars, drafts, accounts, record, info.whole_prompts, loads, info.adapters
    )
    if recorder is not None and recorded is not None:
        policies.kv_event_totals = recorder.totals
        policies.listeners = [*policies.listeners, recorded]
    limits = SchedulerLimits(config.max_num_seqs, config.step_tokens)
    scheduler = Scheduler(limits, pool, policies, make_swap(config, info), clock)
    queue_limits = QueueLimits(config, accounts)
    shedding = LoadShedding(config, scheduler, accounts, record, clock)
    scheduler.listen([queue_limits, shedding])
    return EngineParts(scheduler, queue_limits, shedding)
