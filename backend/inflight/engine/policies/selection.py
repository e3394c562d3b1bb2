"""The answers to the scheduler's questions that `model.json` chooses."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight.config import EngineConfig
from inflight.engine.adapter import Adapters
from inflight.engine.drafting.adaptive_drafter import AdaptiveDrafter
from inflight.engine.drafting.draft_model import DraftModel, DraftRunner, ModelGuesser
from inflight.engine.drafting.drafter import DraftCounts, Drafter, Guesser
from inflight.engine.drafting.grammar_drafter import GrammarDrafter
from inflight.engine.drafting.lookup_drafter import LookupGuesser
from inflight.engine.drafting.safe_drafter import SafeDrafter
from inflight.engine.events import EngineListener
from inflight.engine.host_swap import SwapSpace
from inflight.engine.policies.adapter_admission import AdapterAdmission
from inflight.engine.policies.base import (
    AdmissionPolicy,
    BudgetPolicy,
    LoadShares,
    OrderPolicy,
    Policies,
    UrgencyPolicy,
)
from inflight.engine.policies.budget import LatencyBudget, PartialPrefillLimits, WeighedPrompts
from inflight.engine.policies.deadline_admission import AdmissionRecord, DeadlineAdmission
from inflight.engine.policies.defaults import FreeBlocksAdmission, StaticBudget
from inflight.engine.policies.due_order import DueOrder, make_patience
from inflight.engine.policies.fair_queue import FairQueue
from inflight.engine.policies.grammar_admission import GrammarAdmission
from inflight.engine.policies.memory_admission import PredictedPeakAdmission
from inflight.engine.policies.recompute_cost import LearnedRecomputeCost
from inflight.engine.policies.row_shares import make_turns
from inflight.engine.policies.short_prompts import ShortPromptsFirst
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.policies.tier_admission import TierAdmission
from inflight.engine.policies.urgency import OutrankingFirst
from inflight.engine.policies.vectors_beside import VectorsBeside
from inflight.engine.policies.victims import make_victim
from inflight.engine.policies.whole_prompts import WholePrompts
from inflight.engine.request_factory import ModelInfo
from inflight.engine.tiers.loads import Loads
from inflight.engine.tiers.writer import TierWriter
from inflight.grammars.base import Grammars
from inflight.speculative import SpeculativeConfig

__all__ = ["make_policies", "make_swap"]


def make_policies(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    grammars: Grammars | None = None,
    draft_runner: DraftRunner | None = None,
    accounts: TenantAccounts | None = None,
    record: AdmissionRecord | None = None,
    whole_prompts: bool = False,
    loads: Loads | None = None,
    adapters: Adapters | None = None,
) -> Policies:
    """One answer to each of the scheduler's questions.

    Args:
        clock: of the deadlines.
        grammars: of the checkpoint; a request with one waits until it is compiled.
        draft_runner: of the model that `speculative_config` names; None: drafts are copied from text.
        accounts: of the tenants; None: new ones.
        record: receives admission's findings; None: they are not used.
        whole_prompts: a prompt is computed in one step.
        loads: of KV from tiers; None: there are no tiers.
        adapters: that requests choose; a request waits until its own is loaded.
    """
    listeners: list[EngineListener] = []
    order, shares = _make_order(config, accounts or TenantAccounts(config), listeners)
    counts = DraftCounts()
    drafter: Drafter | None = None
    if config.speculative_config is not None:
        drafter = adaptive = _make_drafter(config, config.speculative_config, draft_runner, clock)
        counts = adaptive.counts
        listeners.append(adaptive)
    admission = _make_admission(config, listeners)
    if loads is not None:
        short = config.step_tokens if config.scheduling_policy == "fcfs" and config.short_prompt_share else 0
        alone = config.max_num_partial_prefills == 1
        admission = from_tier = TierAdmission(admission, loads, order, shares, config.step_tokens, short, alone)
        listeners += [loads, from_tier, TierWriter(loads.tiers, loads.pool)]
    if grammars is not None:
        drafter = forced = GrammarDrafter(grammars, drafter)
        admission = compiled = GrammarAdmission(admission, grammars)
        listeners += [forced, compiled]
    if adapters is not None:
        admission = loaded = AdapterAdmission(admission, adapters, order, shares, clock)
        listeners.append(loaded)
    admission = in_time = DeadlineAdmission(admission, clock, record or AdmissionRecord())
    budget = WholePrompts() if whole_prompts else _make_budget(config, listeners)
    return Policies(
        order=order,
        victim=make_victim(config),
        admission=admission,
        turns=make_turns(config, listeners),
        budget=budget,
        urgency=_make_urgency(config, order, admission, budget, listeners),
        drafter=None if drafter is None else SafeDrafter(drafter),
        draft_counts=counts,
        tier_totals=(lambda: None) if loads is None else loads.tiers.totals,
        listeners=[*listeners, in_time],
    )


def make_swap(config: EngineConfig, info: ModelInfo) -> SwapSpace:
    """Host memory for preempted requests, as `preemption_mode` and `swap_space` say."""
    num_blocks = 0 if config.preemption_mode == "recompute" else info.num_host_blocks
    cost = LearnedRecomputeCost() if num_blocks and config.preemption_mode == "auto" else None
    return SwapSpace(num_blocks, config.block_size, info.swap_seconds_per_block, cost)


def _make_order(
    config: EngineConfig, accounts: TenantAccounts, listeners: list[EngineListener]
) -> tuple[OrderPolicy, LoadShares | None]:
    if config.scheduling_policy == "fcfs" and not config.tenants:
        listeners.append(vectors := VectorsBeside())
        return vectors, None
    patience, preempts = make_patience(config), config.scheduling_policy == "priority"
    if not config.tenants:
        return DueOrder(patience, preempts=preempts), None
    queue = FairQueue(lambda: DueOrder(patience, preempts=preempts), accounts)
    listeners.append(queue)
    return queue, queue


def _make_admission(config: EngineConfig, listeners: list[EngineListener]) -> AdmissionPolicy:
    if config.admission == "free_blocks":
        return FreeBlocksAdmission(config.watermark)
    admission = PredictedPeakAdmission(config.watermark)
    listeners.append(admission)
    return admission


def _make_budget(config: EngineConfig, listeners: list[EngineListener]) -> BudgetPolicy:
    """Without `long_prefill_token_threshold` a prompt is long if it needs more than its share of a step,
    `max_num_batched_tokens / max_num_partial_prefills`."""
    budget: BudgetPolicy = StaticBudget()
    if config.itl_target_ms is not None:
        budget = latency = LatencyBudget(config.itl_target_ms / 1000)
        listeners.append(latency)
    partial, threshold = config.max_num_partial_prefills, config.long_prefill_token_threshold
    if partial > 1 or threshold:
        threshold = threshold or max(1, config.step_tokens // partial)
        budget = limits = PartialPrefillLimits(budget, partial, config.max_long_partial_prefills, threshold)
        listeners.append(limits)
    weighed = WeighedPrompts(budget, config.step_tokens)
    listeners.append(weighed)
    return weighed


def _make_urgency(
    config: EngineConfig,
    order: OrderPolicy,
    admission: AdmissionPolicy,
    budget: BudgetPolicy,
    listeners: list[EngineListener],
) -> UrgencyPolicy | None:
    """Under any policy but fcfs the operator has decided who goes first."""
    if config.scheduling_policy == "priority":
        return OutrankingFirst(order, admission, budget)
    share = config.short_prompt_share
    if config.scheduling_policy != "fcfs" or not share:
        return None
    sizes = config.step_tokens, config.max_num_seqs
    short = ShortPromptsFirst(order, budget, share, *sizes, in_order=bool(config.tenants))
    listeners.append(short)
    return short


def _make_drafter(
    config: EngineConfig, options: SpeculativeConfig, runner: DraftRunner | None, clock: Callable[[], float]
) -> AdaptiveDrafter:
    target = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    guesser: Guesser
    if runner is None:
        guesser = LookupGuesser(options)
    else:
        model = DraftModel(runner, config.max_num_seqs, config.step_tokens, config.block_size)
        guesser = ModelGuesser(model)
    return AdaptiveDrafter(guesser, options.longest_draft, target, clock)
