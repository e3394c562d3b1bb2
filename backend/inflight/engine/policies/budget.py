"""How much of a prompt a step computes, beyond `StaticBudget`.

`LatencyBudget` keeps steps with decodes within a target (`itl_target_ms`).  `PartialPrefillLimits` wraps it, or
the static budget, and keeps short prompts from queueing behind long ones.  `WeighedPrompts` wraps either, and keeps
prompts from queueing behind prompts with requested log probabilities.  Pure Python, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.logprobs import prompt_token_weight
from inflight.engine.policies.base import BudgetPolicy
from inflight.engine.policies.cost_model import OnlineStepCost, StepLoad, step_load
from inflight.engine.request import Request

__all__ = ["MIN_CHUNK", "STARVED_STEPS", "LatencyBudget", "PartialPrefillLimits", "WeighedPrompts"]

# Prompts progress at any target: within STARVED_STEPS consecutive steps with decodes and prompts, at least
# MIN_CHUNK tokens of prompts are computed.  A prompt of P tokens that is first in line is therefore computed
# within STARVED_STEPS * (P / MIN_CHUNK + 1) steps.
MIN_CHUNK = 32
STARVED_STEPS = 8
_PACE = MIN_CHUNK // STARVED_STEPS  # tokens per step; smaller chunks are not granted, except for the end of a prompt
# A chunk is at most this many times the largest one measured so far.
_LARGEST_JUMP = 2
# Number of steps with prompts that determine the headroom, and the headroom before the first of them.
_JUDGED = 100
_INITIAL_HEADROOM = 0.25
# A step that exceeds its expected time by more than this share is an outlier, which the headroom does not cover.
_MAX_HEADROOM = 0.5


class LatencyBudget(EngineListener):
    """Gives prompts as many tokens as keep a step with decodes within `target`, by an online model of its cost.

    Without decodes no request waits for the step, and prompts get all of it.  With decodes,

        expected(decodes + chunks so far + this chunk) * (1 + headroom) <= target

    where the headroom is the largest relative overrun of the last hundred steps with prompts, so that about
    one step in a hundred is late, for any noise of the machine and any error of the model (split conformal
    prediction, Lei et al., arXiv:1604.04173).  While little is known, the headroom is large and chunks are
    small: the first has `MIN_CHUNK` tokens, and none has more than twice as many as the largest one measured.
    If the target cannot be met, it yields: prompts progress as described at `STARVED_STEPS`.

    Args:
        target: seconds between two tokens of a running request.

    Attributes:
        headroom: relative to the expected seconds of a step.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.model = OnlineStepCost()
        self._load = StepLoad()
        self._decodes = 0
        self.headroom = _INITIAL_HEADROOM
        self._overruns: deque[float] = deque(maxlen=_JUDGED)
        self._asked = False
        self._granted = 0
        self._behind = 0  # tokens that prompts are behind their minimum pace

    def step_begins(self, running: Sequence[Request]) -> None:
        if self._asked:
            self._behind = max(0, self._behind + _PACE - self._granted)
        self._asked, self._granted = False, 0
        decodes = context = 0
        for request in running:
            total = request.num_total_tokens
            if total - request.num_computed_tokens == 1 and total < request.max_total_tokens:
                decodes += 1
                context += total
        self._decodes = decodes
        self._load = StepLoad(decodes, context)

    def grant(self, request: Request, missing: int, limit: int) -> int:
        computed = request.num_total_tokens - missing
        if missing == 1:  # a decode that resumes after a swap
            self._load = self._load._replace(
                decodes=self._load.decodes + 1, context_tokens=self._load.context_tokens + computed + 1
            )
            return limit
        num_tokens = min(limit, self._affordable(computed)) if self._decodes else limit
        if num_tokens < min(limit, _PACE):
            starved = self._behind + _PACE >= MIN_CHUNK and not self._granted
            num_tokens = min(limit, MIN_CHUNK) if starved else 0
        self._asked = True
        if num_tokens:
            self._granted += MIN_CHUNK if num_tokens == missing else num_tokens  # a last chunk counts as a full one
            self._load = self._load.with_prefill(computed, num_tokens)
        return num_tokens

    def step_done(self, step: DoneStep) -> None:
        """Learn from a step's time, including making it: its requests wait for that, too."""
        load, seconds = step_load(step.out), step.result.ended - step.start
        expected = self.model.cost.seconds(load)
        judged = load.prefills and load.decodes and self.model.knows_prompts
        if judged and 0.0 < seconds <= expected * (1 + _MAX_HEADROOM):
            self._overruns.append(seconds / expected - 1)
            self.headroom = max(*self._overruns, _INITIAL_HEADROOM * (1 - len(self._overruns) / _JUDGED))
        self.model.observe(load, seconds)

    def _affordable(self, computed: int) -> int:
        """How many tokens after `computed` ones the step has time for."""
        cost = self.model.cost
        jump = max(MIN_CHUNK, _LARGEST_JUMP * self.model.largest_prefill) - self._load.prefill_tokens
        room = self.target / (1 + self.headroom) - cost.seconds(self._load.with_prefill(computed, 0))
        if room <= 0:
            return 0
        # room = b n + e (n computed + n (n + 1) / 2), solved for n
        half = cost.per_attention_pair / 2
        linear = cost.per_prefill_token + cost.per_attention_pair * computed + half
        if linear <= 0:
            return jump
        root = sqrt(linear * linear + 4 * half * room)
        return min(jump, int(2 * room / (linear + root)))


class PartialPrefillLimits(EngineListener):
    """Bounds how many prompts are partly computed at once, and how much of a step a long one takes.

    A prompt beyond the limit is passed over in favour of short ones behind it that fit the step as a whole.  It
    stays first in line and takes the place of the next prompt that completes, so it waits for no more prompts
    than were partly computed when it reached the front.

    Args:
        inner: divides the tokens within these limits.
        max_partial: prompts that may be partly computed after a step.
        max_long: how many of these may be long.
        threshold: a request with more tokens to compute is long, and gets at most so many in a step.
    """

    def __init__(self, inner: BudgetPolicy, max_partial: int, max_long: int, threshold: int) -> None:
        self.inner = inner
        self._max_partial, self._max_long, self._threshold = max_partial, max_long, threshold
        self._partial = self._long = 0

    def step_begins(self, running: Sequence[Request]) -> None:
        missing = [r.num_total_tokens - r.num_computed_tokens for r in running]
        self._partial = sum(count > 1 for count in missing)
        self._long = sum(count > self._threshold for count in missing)

    def grant(self, request: Request, missing: int, limit: int) -> int:
        is_long = missing > self._threshold
        if is_long:
            limit = min(limit, self._threshold)
        counted = request.slot >= 0  # it is running: `step_begins` has counted it
        if not counted:
            full = self._partial >= self._max_partial and limit < missing
            if full or (is_long and self._long >= self._max_long):
                return 0
        num_tokens = self.inner.grant(request, missing, limit)
        if not counted and 0 < num_tokens < missing:
            self._partial += 1
            self._long += is_long
        elif counted and num_tokens == missing:
            self._partial -= 1
            self._long -= is_long
        return num_tokens


class WeighedPrompts(EngineListener):
    """Counts a prompt token as `prompt_token_weight` tokens of the step.

    So such prompts make a step at most twice as long, and the tokens that they leave go to the prompts behind them.
    The first one of a step gets at least one token.

    Args:
        inner: divides the tokens that are left.
        max_num_batched_tokens: tokens of a step.
    """

    def __init__(self, inner: BudgetPolicy, max_num_batched_tokens: int) -> None:
        self.inner = inner
        self._limit = max_num_batched_tokens
        self._counted = 0.0  # in this step, so far

    def step_begins(self, running: Sequence[Request]) -> None:
        self._counted = 0.0

    def grant(self, request: Request, missing: int, limit: int) -> int:
        count = request.params.prompt_logprobs
        if not count or request.num_prompt_logprobs >= request.num_prompt_tokens:
            return self.inner.grant(request, missing, limit)
        weight = prompt_token_weight(count)
        room = max(not self._counted, int((self._limit - self._counted) / weight))
        num_tokens = self.inner.grant(request, missing, min(limit, room)) if room else 0
        self._counted += weight * num_tokens
        return num_tokens
