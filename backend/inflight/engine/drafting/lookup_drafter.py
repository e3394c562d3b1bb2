"""Drafts from the text itself: the tokens that followed earlier occurrences of the last tokens.  No torch.

N-gram lookup after Saxena's prompt lookup decoding; past outputs, and drafts as long as their match
suggests, after SuffixDecoding (Oliaro et al., arXiv:2411.04975).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.engine.drafting.drafter import Guess
from inflight.engine.drafting.token_index import Occurrences, match_length
from inflight.engine.request import Request
from inflight.speculative import SpeculativeConfig

__all__ = ["LookupGuesser"]

_CANDIDATES = 8  # places whose matches are compared, and which vote on the next token with method "suffix"
_SEPARATOR = -1  # between past outputs: no token
_HALF = 2**15  # tokens in each of the two halves of a tenant's past outputs; 5 MB
_MAX_PAST_TOKENS = 2**18  # of all tenants; 40 MB
_WIDTH = 2  # tokens that must match, with method "suffix"
_LONG = 16  # from so many matching tokens on, the chance that a copy is right is the same


@dataclass(slots=True)
class _Past:
    """Outputs of one tenant: the younger half grows, and replaces the older one when it is full."""

    width: int
    tokens: list[array[int]] = field(default_factory=list)
    places: list[Occurrences] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def add(self, output: array[int], max_outputs: int) -> None:
        full = not self.tokens or len(self.tokens[0]) >= _HALF or 2 * self.outputs[0] >= max_outputs
        if full:
            text = array("i")
            self.tokens = [text, *self.tokens[:1]]
            self.places = [Occurrences(text, self.width), *self.places[:1]]
            self.outputs = [0, *self.outputs[:1]]
        self.tokens[0].extend(output)
        self.tokens[0].append(_SEPARATOR)
        self.outputs[0] += 1
        self.places[0].learn(len(self.tokens[0]))


class LookupGuesser:
    """Implements `Guesser`: copies from a request's own text, and from past outputs with its tenant and cache salt."""

    computes = False

    def __init__(self, config: SpeculativeConfig) -> None:
        suffix = config.method == "suffix"
        self._width = _WIDTH if suffix else config.prompt_lookup_min
        self._max_match = config.suffix_decoding_max_tree_depth if suffix else config.prompt_lookup_max
        self._factor = config.suffix_decoding_max_spec_factor if suffix else float("inf")
        self._min_share = config.suffix_decoding_min_token_prob if suffix else 0.0
        self._votes = self._goes_on = suffix
        self._max_past = config.suffix_decoding_max_cached_requests if suffix else 0
        self._own: dict[Request, Occurrences] = {}
        # The source of the last guess: the text, the place in it, and `num_tokens` at that time.
        self._sources: dict[Request, tuple[array[int], int, int]] = {}
        self._past: OrderedDict[tuple[str, tuple[str, ...]], _Past] = OrderedDict()

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        """Nothing to prepare: `guess` looks texts up."""

    def guess(self, request: Request, limit: int) -> Guess | None:
        """Up to `limit` tokens after the last known one; None without any match.

        If the last tokens occur nowhere else, but the text before them was a copy, the guess continues in the source
        past the differing tokens: most changes replace one token by another.  The guess's `match` is then 0.
        """
        tokens, end = request.token_ids, request.num_tokens
        if end <= self._width:
            return None
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = Occurrences(tokens, self._width)
        own.learn(end - 1)
        key = own.key(tokens[end - self._width :])
        found = self._matching(tokens, own.behind(key, _CANDIDATES), tokens)
        past = self._past.get((request.tenant, request.cache_salts))
        if past is not None:
            for text, places in zip(past.tokens, past.places):
                found += self._matching(text, places.behind(key, _CANDIDATES), tokens)
        if not found:
            return self._go_on(request, limit)
        longest = max(match for _, _, match in found)
        voters = [(text, place) for text, place, match in found if match == longest]
        if not self._votes:  # the latest; how far it matches in truth says how likely it is right
            voters, longest = voters[:1], max(longest, match_length(*voters[0], tokens, _LONG))
        self._sources[request] = *voters[0], end
        limit = max(1, int(min(limit, self._factor * longest)))
        return self._vote(voters, tokens, limit, longest)

    def _go_on(self, request: Request, limit: int) -> Guess | None:
        source = self._sources.get(request)
        if source is None or not self._goes_on:
            return None
        text, place, then = source
        return self._vote([(text, place + request.num_tokens - then)], request.token_ids, limit, 0)

    def ended(self, request: Request) -> None:
        """Forget the request, but keep its output for later requests to copy."""
        self._sources.pop(request, None)
        own = self._own.pop(request, None)
        output = request.token_ids[request.num_prompt_tokens : request.num_prompt_tokens + _HALF]
        if own is None or not self._max_past or len(output) <= self._width:
            return
        owner = request.tenant, request.cache_salts
        past = self._past.get(owner)
        if past is None:
            past = self._past[owner] = _Past(self._width)
        self._past.move_to_end(owner)
        past.add(output, self._max_past)
        while len(self._past) > 1 and sum(past.num_tokens for past in self._past.values()) > _MAX_PAST_TOKENS:
            self._past.popitem(last=False)

    def _matching(
        self, text: array[int], places: Sequence[int], context: array[int]
    ) -> list[tuple[array[int], int, int]]:
        found = []
        for place in places:
            match = match_length(text, place, context, self._max_match)
            if match >= self._width:  # else only the hashes are equal
                found.append((text, place, match))
        return found

    def _vote(self, voters: list[tuple[array[int], int]], own: array[int], limit: int, match: int) -> Guess | None:
        """The continuation that most voters have, as long as enough agree."""
        guess = Guess([], [], match)
        path = 1.0
        while len(guess.tokens) < limit:
            at = len(guess.tokens)
            if len(voters) == 1:
                self._copy(voters[0], own, guess, limit)
                break
            ballots: dict[int, list[tuple[array[int], int]]] = {}
            for text, place in voters:
                token = self._token(text, place + at, own, guess)
                ballots.setdefault(token, []).append((text, place))
            ballots.pop(_SEPARATOR, None)
            if not ballots:
                break
            token, agreeing = max(ballots.items(), key=lambda ballot: len(ballot[1]))
            share = len(agreeing) / len(voters)
            path *= share
            if path < self._min_share:
                break
            guess.tokens.append(token)
            guess.shares.append(share)
            voters = agreeing
        return guess if guess.tokens else None

    def _token(self, text: array[int], place: int, own: array[int], guess: Guess) -> int:
        """The token at `place`; the guess so far continues a request's own text."""
        if place < len(text):
            return text[place]
        beyond = place - len(text)
        return guess.tokens[beyond] if text is own and beyond < len(guess.tokens) else _SEPARATOR

    def _copy(self, voter: tuple[array[int], int], own: array[int], guess: Guess, limit: int) -> None:
        text, place = voter
        while len(guess.tokens) < limit:
            token = self._token(text, place + len(guess.tokens), own, guess)
            if token == _SEPARATOR:
                break
            guess.tokens.append(token)
            guess.shares.append(1.0)
