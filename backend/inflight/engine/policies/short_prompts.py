"""Lets short prompts start beside long ones that are being computed, instead of behind them.  Pure Python, no torch.

First come, first served gives a step's tokens to the prompts in the order of their arrival, so the first token of a
short prompt would wait for every long one that came before it.  Here short prompts go ahead on credit, the token bucket
of traffic shaping, which the prompts that are computed in order earn for them:

    overtaking tokens  <=  B + share / (1 - share) * tokens of prompts that were computed in order

over any time, with B = `max_num_batched_tokens`.  No credit is given for time that passes, so the bound holds however
long a prompt waits, and none starves.  A prompt with P tokens in line, its own included, gets its first token within

    (P / (1 - share) + B) / (B - D) + 2  steps

with D decodes in each, unless it also waits for a slot or for blocks: all steps but the last compute B - D tokens of
prompts, which are fewer than P in order and no more than the bound ahead of them.  The others get all tokens of
a step that short prompts leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.logprobs import prompt_token_weight
from inflight.engine.policies.base import BudgetPolicy, OrderPolicy
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput

__all__ = ["ShortPromptsFirst"]

_LOOK_AHEAD = 16  # waiting requests in a step for which the credit may turn out too small


class ShortPromptsFirst(EngineListener):
    """Implements `UrgencyPolicy`: short prompts start before a prompt that is partly computed continues.

    A prompt is short if the credit covers what it has to compute: with an idle start, one step.  It starts only if
    the step computes all of it, and never takes blocks or the last free slot from others.

    Args:
        order: the waiting requests.
        budget: decides how many tokens they get.
        share: of the tokens of prompts, for the ones that go ahead; above 0 and below 1.
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: slots.
        in_order: only requests that are next in `order` go ahead of the running ones; else the shortest prompts first.

    Attributes:
        credit: tokens that short prompts may take ahead of others.
    """

    def __init__(
        self,
        order: OrderPolicy,
        budget: BudgetPolicy,
        share: float,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        in_order: bool,
    ) -> None:
        self._order = order
        self._budget = budget
        self._rate = share / (1 - share)
        self._most = self.credit = float(max_num_batched_tokens)
        self._max_num_seqs = max_num_seqs
        self._in_order = in_order
        self._granted = 0  # tokens of the request that was asked about last
        self._price = 0.0  # of one of them
        self._num_ahead = 0  # tokens of this step that went ahead

    def next_requests(self, running: Sequence[Request]) -> Iterator[Request]:
        if not len(self._order) or not any(r.num_total_tokens - r.num_computed_tokens > 1 for r in running):
            return  # only a prompt that is partly computed keeps others waiting for tokens
        free = self._max_num_seqs - len(running) - 1  # the next in order keeps a slot
        passed_over = 0
        for request in self._candidates(free):
            if free <= 0 or passed_over == _LOOK_AHEAD:
                return
            yield request
            if request.status is Status.RUNNING:
                free -= 1
                self.credit -= self._granted * self._price
                self._num_ahead += self._granted
            elif self._in_order:
                return
            else:
                passed_over += 1

    def grant(self, request: Request, missing: int, limit: int) -> int:
        self._price = prompt_token_weight(request.params.prompt_logprobs or 0)
        covered = missing <= limit and missing * self._price <= self.credit
        self._granted = self._budget.grant(request, missing, limit) if covered else 0
        return self._granted

    def giving_way(
        self,
        request: Request,
        prefix: Sequence[int],
        beside: Sequence[Request],
        running: Sequence[Request],
        pool: KVPool,
    ) -> Sequence[Request]:
        return ()

    def step_made(self, out: SchedulerOutput) -> None:
        earned = self._rate * max(0, out.num_prompt_tokens - self._num_ahead)
        self.credit, self._num_ahead = min(self._most, self.credit + earned), 0

    def _candidates(self, free: int) -> list[Request]:
        """Waiting requests that may be short: how much of them the prefix cache has is not known yet."""
        if self._in_order:
            return self._order.next_requests(free)
        waiting = self._order.next_requests(len(self._order))
        return sorted((r for r in waiting if r.num_tokens <= self._most), key=lambda r: r.num_tokens)
