"""Builds an engine core: the scheduler, policies and limits that the options choose.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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

__all__ = ["make_core", "make_parts"]


def make_core(
    config: EngineConfig,
    runner: Runner,
    clock: Callable[[], float] = time.monotonic,
    listeners: Iterable[EngineListener] = (),
) -> EngineCore:
    """An engine with these options on `runner`; the same in-process, served and simulated.

    Args:
        clock: see `EngineCore`.
        listeners: see `EngineCore`.
    """
    return EngineCore(config, runner, make_parts(config, runner, clock), clock, listeners)


def make_parts(config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> EngineParts:
    """The parts of `EngineCore`; limits and shedding listen to the scheduler's events."""
    info = runner.info
    accounts, record = TenantAccounts(config), AdmissionRecord()
    pool, loads = KVPool(info.num_blocks, config.block_size), None
    if info.tiers is not None:
        info.tiers.num_pools += 1
        longest = info.max_model_len + 1  # with the void token of a pooled request
        pool = tiered = TieredPool(info.num_blocks, config.block_size, longest, info.tiers.reserved)
        loads = Loads(info.tiers, tiered, clock)
    drafts = runner.draft_runner
    policies = make_policies(
        config, clock, info.grammars, drafts, accounts, record, info.whole_prompts, loads, info.adapters
    )
    limits = SchedulerLimits(config.max_num_seqs, config.step_tokens)
    scheduler = Scheduler(limits, pool, policies, make_swap(config, info), clock)
    queue_limits = QueueLimits(config, accounts)
    shedding = LoadShedding(config, scheduler, accounts, record, clock)
    scheduler.listen([queue_limits, shedding])
    return EngineParts(scheduler, queue_limits, shedding)
