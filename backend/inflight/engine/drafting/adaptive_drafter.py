"""Drafts only where they pay.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.drafting.drafter import DraftCounts, Guess, Guesser
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import Request

__all__ = ["AdaptiveDrafter"]

# Chance that a copied token is accepted, by the length of the match before it: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 and
# more.
_FIRST_BELIEF = (0.5, 0.4, 0.5, 0.6, 0.8, 0.9)
_LEVELS = len(_FIRST_BELIEF)
_TENANT_WEIGHT = 8.0  # own tokens with which a request's experience counts as much as its tenant's
_FORGET = 0.98  # factor of the old counts, for each token tried
# After tokens that are still unknown, a draft must gain more than the token of the step that the row then sits out.
_SITTING_OUT = 1.5
_MAX_TENANTS = 1000  # tenants with experience
_PROBE_TOKENS = 128  # after so many tokens without a draft, a request tries one draft token, however unlikely
# Wasted work may take this share of the time; above it, requests without a draft pause.
_MAX_SHARE = 0.003
_LONGEST_PAUSE = 64  # tokens
_FRUITLESS = 16  # steps without an accepted draft token; then all work counts as wasted, and steps are skipped
_LONGEST_REST = 8  # steps
_FADING = 0.95  # factor of the measured times, after each step


@dataclass(slots=True)
class _Experience:
    """Tokens tried and accepted, by level; older ones count less."""

    tried: list[float] = field(default_factory=lambda: [0.0] * _LEVELS)
    hits: list[float] = field(default_factory=lambda: [0.0] * _LEVELS)

    def add(self, level: int, hit: bool) -> None:
        self.tried[level] = _FORGET * self.tried[level] + 1.0
        self.hits[level] = _FORGET * self.hits[level] + hit

    def belief(self, level: int, prior: float) -> float:
        return (self.hits[level] + _TENANT_WEIGHT * prior) / (self.tried[level] + _TENANT_WEIGHT)


@dataclass(slots=True)
class _Sequence:
    """The drafter's state of one request.

    Attributes:
        match: tokens that matched before the draft that is being verified.
        last_draft: `num_tokens` at its last draft.
        next_look: `num_tokens` from which to look for a draft again.
    """

    experience: _Experience = field(default_factory=_Experience)
    match: int = 0
    last_draft: int = 0
    next_look: int = 0


class AdaptiveDrafter(EngineListener):
    """Implements `Drafter`: proposes as much of a guess as pays at the price of the step.

    Args:
        guesser: guesses the next tokens.
        max_tokens: most tokens of a draft.
        target: seconds that a step with drafts should not exceed.
        clock: seconds, to measure how long drafting takes.
    """

    def __init__(
        self,
        guesser: Guesser,
        max_tokens: int,
        target: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._guesser = guesser
        self._max_tokens = max_tokens
        self._sequences: dict[Request, _Sequence] = {}
        self._tenants: dict[str, _Experience] = {}
        self.prices = DraftPrices(target)
        self.counts = DraftCounts(at=[0] * max_tokens)
        self._step_accepted = 0
        self._hoped = 0  # tokens that a computing guesser was asked for in this step
        self._asked: set[Request] = set()  # the requests that it was asked for
        self._clock = clock
        self._pause = 1
        self._fruitless = 0  # steps since the last accepted draft token
        self._rest = 0  # coming steps that are skipped altogether
        self._spent = 0.0  # seconds spent on the step that is being made, without looking up
        self._wasted = self._seconds = 0.0  # seconds of work without a draft, and of steps; both fade

    @property
    def active(self) -> bool:
        return self.prices.room > 0

    def step_begins(self, running: Sequence[Request]) -> None:
        if self._rest:
            self.prices.room = 0
            return
        start = self._clock()
        self.prices.begin(len(running))
        if self._guesser.computes and self.prices.price >= 1.0:
            self.prices.room = min(1, self.prices.room)  # a model must catch up with the text of one that probes
        self._hoped = 0
        self._asked.clear()
        self._guesser.begin(running, self._hope)
        self._spent = self._clock() - start

    def step_done(self, step: DoneStep) -> None:
        num_drafts = sum(map(len, step.out.draft_token_ids.values()))
        only_decodes = step.out.num_tokens - num_drafts == len(step.out.slots)
        self.step_took(len(step.out.slots) if only_decodes else 0, num_drafts, step.result.ended - step.start)

    def step_took(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """A step ended, and its tokens were observed; 0 sequences: it computed more than decodes and drafts."""
        self._seconds = _FADING * self._seconds + seconds
        self._wasted *= _FADING
        if self._rest and not num_drafts:
            self._rest -= 1
            self.prices.passed()
            return
        start = self._clock()
        if num_sequences:
            self.prices.observe(num_sequences, num_drafts, self._step_accepted, seconds)
        self._fruitless = 0 if self._step_accepted else self._fruitless + 1
        self._step_accepted = 0
        if self._fruitless >= _FRUITLESS:
            self._wasted += self._spent + self._clock() - start
        self._spent = 0.0
        if self._wasted > _MAX_SHARE * self._seconds:
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
            self._wasted /= 2.0  # what the longer pause is expected to leave
        elif self._wasted < _MAX_SHARE / 4 * self._seconds:
            self._pause = max(1, self._pause // 2)
        if self._fruitless >= _FRUITLESS and not self._guesser.computes:  # a computing guesser works only where it pays
            self._rest = min(_LONGEST_REST, self._pause) - 1

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        limit = min(limit, self._max_tokens, self.prices.room)
        if limit <= 0 or not request.num_output_tokens:  # `ended` ignores a request without output
            return ()
        sequence = self._sequence(request)
        if request.num_tokens < sequence.next_look:
            return ()
        start = self._clock()
        guess = self._guesser.guess(request, limit + num_unknown)
        count = 0 if guess is None else self._worth(guess, num_unknown, request, sequence)
        if guess is not None and not count:
            count = int(self._probes(request, sequence))
        if guess is None or not count:
            if not self._guesser.computes or request in self._asked:  # else no work was done
                sequence.next_look = request.num_tokens + self._pause
                self._wasted += self._clock() - start
            return ()
        sequence.match, sequence.last_draft = guess.match + num_unknown, request.num_tokens
        self.prices.room -= count
        return guess.tokens[num_unknown : num_unknown + count]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._step_accepted += num_accepted
        sequence = self._sequences[request]
        counts = self.counts
        counts.drafts += 1
        counts.tokens += num_drafts
        counts.accepted += num_accepted
        for place in range(num_accepted):
            counts.at[place] += 1
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Experience()
            if len(self._tenants) > _MAX_TENANTS:  # clients can make up names
                del self._tenants[next(iter(self._tenants))]
        for place in range(min(num_drafts, num_accepted + 1)):
            level = _level(sequence.match + place)
            tenant.add(level, place < num_accepted)
            sequence.experience.add(level, place < num_accepted)

    def ended(self, request: Request) -> None:
        if request.num_output_tokens:
            self._sequences.pop(request, None)
            self._guesser.ended(request)

    def _sequence(self, request: Request) -> _Sequence:
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = self._sequences[request] = _Sequence(last_draft=request.num_tokens)
        return sequence

    def _hope(self, request: Request) -> int:
        """How many tokens are worth guessing, before the guess is known; in all, as many as the step has room for."""
        room = min(self._max_tokens, self.prices.room - self._hoped)
        if room <= 0 or not request.num_output_tokens:
            return 0
        sequence = self._sequence(request)
        if request.num_tokens < sequence.next_look:
            return 0
        unknown = request.num_total_tokens - 1 - request.num_tokens
        guess = Guess([], [1.0] * (unknown + room), 0)
        count = self._worth(guess, unknown, request, sequence) or int(self._probes(request, sequence))
        if count:
            self._asked.add(request)
        self._hoped += count
        return count

    def _probes(self, request: Request, sequence: _Sequence) -> bool:
        """Whether to try one token that does not pay as far as is known."""
        return self.prices.price >= 1.0 or request.num_tokens - sequence.last_draft >= _PROBE_TOKENS

    def _worth(self, guess: Guess, num_unknown: int, request: Request, sequence: _Sequence) -> int:
        """How many of the tokens after the first `num_unknown` are each worth their price."""
        price = self.prices.price
        if price >= 1.0:
            return 0
        tenant = self._tenants.get(request.tenant)
        chance, gain, count = 1.0, 0.0, 0
        for place, share in enumerate(guess.shares):
            level = _level(guess.match + place)
            prior = _FIRST_BELIEF[level] if tenant is None else tenant.belief(level, _FIRST_BELIEF[level])
            chance *= share * sequence.experience.belief(level, prior)
            if chance <= price:
                break
            if place >= num_unknown:
                gain += chance
                count += 1
        if num_unknown and gain < _SITTING_OUT:
            return 0
        return count


def _level(match: int) -> int:
    return min(match.bit_length(), _LEVELS - 1)
