"""What `model.json` chooses at the scheduler's seam (`policy.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight.config import EngineConfig
from inflight.engine.drafting.adaptive_drafter import ThriftyDrafter
from inflight.engine.drafting.draft_model import DraftModel, DraftRunner
from inflight.engine.drafting.drafter import DraftCounts, Drafter
from inflight.engine.drafting.grammar_drafter import ForcedTokens
from inflight.engine.drafting.lookup_drafter import CopyDrafts
from inflight.engine.drafting.modelled import ModelDrafts
from inflight.engine.policies.base import BudgetPolicy, FcfsOrder, OrderPolicy, Policies
from inflight.engine.policies.budget import WeighedPrompts, make_budget
from inflight.engine.policies.deadline_admission import InTimeAdmission
from inflight.engine.policies.due_order import DueOrder, make_patience
from inflight.engine.policies.fair_queue import FairQueue
from inflight.engine.policies.grammar_admission import GrammarAdmission
from inflight.engine.policies.memory_admission import make_admission
from inflight.engine.policies.row_shares import make_turns
from inflight.engine.policies.speculation_feedback import DraftedAdmission, DraftedBudget
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.policies.victims import make_victim
from inflight.grammars.base import Grammars
from inflight.speculative import SpeculativeConfig

__all__ = ["make_policies"]


def make_policies(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    grammars: Grammars | None = None,
    draft_runner: DraftRunner | None = None,
) -> Policies:
    """One answer to each of the scheduler's questions.

    Args:
        clock: that of the deadlines.
        grammars: of the checkpoint; requests that have one wait until it is compiled.
        draft_runner: of the model that `speculative_config` names; None: drafts are copied from text.
    """
    admission = make_admission(config)
    budget: BudgetPolicy = WeighedPrompts(make_budget(config), config.max_num_batched_tokens)
    drafter: Drafter | None = None
    counts = DraftCounts()
    if config.speculative_config is not None:
        drafter = thrifty = _make_drafter(config, config.speculative_config, draft_runner, clock)
        counts = thrifty.counts
        admission, budget = DraftedAdmission(admission, thrifty), DraftedBudget(budget, thrifty)
    if grammars is not None:
        drafter = forced = ForcedTokens(grammars, drafter)
        admission = GrammarAdmission(admission, grammars, forced)
    return Policies(
        order=_make_order(config),
        victim=make_victim(config),
        admission=InTimeAdmission(admission, clock),
        turns=make_turns(config),
        budget=budget,
        drafter=drafter,
        draft_counts=counts,
    )


def _make_drafter(
    config: EngineConfig, options: SpeculativeConfig, runner: DraftRunner | None, clock: Callable[[], float]
) -> ThriftyDrafter:
    longest = options.longest_draft
    target = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    if runner is None:
        return ThriftyDrafter(CopyDrafts(options), longest, target, clock)
    model = DraftModel(runner, config.max_num_seqs, config.max_num_batched_tokens, config.block_size)
    return ThriftyDrafter(ModelDrafts(model), longest, target, clock)


def _make_order(config: EngineConfig) -> OrderPolicy:
    if config.scheduling_policy == "fcfs" and not config.tenants:
        return FcfsOrder()
    patience, preempts = make_patience(config), config.scheduling_policy == "priority"
    if config.tenants:
        return FairQueue(lambda: DueOrder(patience, preempts=preempts), TenantAccounts(config))
    return DueOrder(patience, preempts=preempts)
