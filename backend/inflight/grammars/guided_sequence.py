"""One sequence's way through a grammar of llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from inflight.grammars.spec import BEYOND_LIMITS

__all__ = ["GuidedSequence", "SteadyRuns", "reason", "shown"]

_MAX_FORCED = 64  # tokens of a forced text that are followed at once; those behind them are asked for there
_MAX_RUNS = 4096  # remembered
_LIMIT_ERRORS = ("lexer error:", "parser error:")  # how llguidance begins to say that it reached a limit


class SteadyRuns:
    """How many tokens of a forced text a mask admits alone, one after the other.

    A mask admits the first token of the text that is still forced, as the tokenizer writes it behind the token before.
    Tokenizers nearly always continue as they began, but not by any rule.  So each run is followed once and remembered.
    """

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, bytes, tuple[int, ...]], int] = {}

    def steady(self, matcher: Any, last: int, tokens: list[int]) -> list[int]:
        """The part of `tokens`, an `LLMatcher`'s forced ones behind the token `last`, up to `_MAX_FORCED` of them.

        The matcher stays where it is.  If it reaches a limit on the way, it has an error, and nothing is forced.
        """
        if not tokens:
            return tokens
        tokens = tokens[:_MAX_FORCED]
        key = last, blake2b(matcher.compute_ff_bytes(), digest_size=16).digest(), tuple(tokens)
        length = self._lengths.get(key)
        if length is None:
            length = _follow(matcher, tokens)
            if matcher.is_error():
                return []
            if len(self._lengths) >= _MAX_RUNS:
                self._lengths.clear()
            self._lengths[key] = length
        return tokens[:length]


def _follow(matcher: Any, tokens: list[int]) -> int:
    count = 0
    for token in tokens:
        if (count and matcher.compute_ff_tokens()[:1] != [token]) or not matcher.try_consume_tokens([token]):
            break
        count += 1
    matcher.rollback(count)
    return count


class GuidedSequence:
    """Implements `Grammar`.

    To check a token, the matcher takes nearly all the steps that it takes to consume it, in memory that the forward
    pass has driven out of the caches.  So tokens that were found allowed stay consumed, *ahead* of `num_tokens`: as a
    rule they are the next ones that `advance` gets.  If others come, they are rolled back.

    Args:
        matcher: an `LLMatcher` at the start, which this object keeps.
        num_known: the first tokens, which it knows; no others are allowed.
        eos_token_ids: of the checkpoint.
        runs: shared by all sequences of a vocabulary.
    """

    def __init__(self, matcher: Any, num_known: int, eos_token_ids: list[int], runs: SteadyRuns) -> None:
        self.error = ""
        self.num_tokens = 0
        self._matcher = matcher
        self._num_known = num_known
        self._eos_token_ids = eos_token_ids
        self._runs = runs
        self._last = -1  # of the `num_tokens` tokens
        self._ahead: list[int] = []
        self._run: list[int] | None = None  # what is forced behind them; None: not known

    def known_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Those before the first that the library does not know, and which would end the sequence."""
        num_known = self._num_known
        return list(takewhile(lambda token: token < num_known, token_ids))

    def matcher_behind(self, token_ids: Sequence[int]) -> Any:
        """The `LLMatcher` behind `num_tokens` tokens and these, which can follow."""
        self._go_to(token_ids)
        return self._matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        if not token_ids or self.error:
            return
        count = len(token_ids)
        self.num_tokens += count
        self._last = token_ids[-1]
        run = self._run
        self._run = run[count:] if run is not None and len(run) > count and run[:count] == token_ids else None
        if self._ahead[:count] == token_ids:
            del self._ahead[:count]
            return
        self._go_to(token_ids)
        rest = token_ids[len(self._ahead) :]
        self._ahead.clear()
        if rest and not (self._matcher.is_stopped() and set(rest) <= set(self._eos_token_ids)):
            self.check()
            self.error = self.error or f"the grammar cannot go on: it does not allow token {rest[0]}"

    def known(self, draft_token_ids: Sequence[int]) -> list[int]:
        run = [] if self.error else self._forced_run()
        run = run[: len(draft_token_ids) + 1]
        for place, (token, draft) in enumerate(zip(run, draft_token_ids), 1):
            if token != draft:
                return run[:place]
        return run

    def settle(self, draft_token_ids: Sequence[int], token_ids: list[int], certain: Sequence[bool]) -> int:
        if self.error:
            return 0
        run = self._forced_run()
        if not (run or draft_token_ids):  # the usual case
            if not certain[0]:
                return 0
            if self._ahead:
                self._go_to(())
            if not self._matcher.try_consume_tokens(self.known_ids(token_ids)):
                return 0
            self._ahead.append(token_ids[0])
            return 1
        end, place = len(token_ids) - 1, 0
        for token in run:
            token_ids[place] = token
            if place == end or token != draft_token_ids[place]:
                return end + 1
            place += 1
        self._go_to(draft_token_ids[:place])
        matcher = self._matcher
        while True:
            only = self._forced_tokens()[:1] if place else None
            if only:
                token_ids[place : place + 1] = only
            elif not certain[place]:
                return place
            token = token_ids[place]
            if not matcher.try_consume_tokens(self.known_ids([token])):
                return place
            self._ahead.append(token)
            if place == end or token != draft_token_ids[place]:
                return end + 1
            place += 1

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0 if self.error else int(self.matcher_behind(()).validate_tokens(self.known_ids(token_ids)))

    def check(self) -> None:
        if not self.error and self._matcher.is_error():
            self.error = reason(self._matcher)

    def forced(self, limit: int) -> list[int]:
        if self.error:
            return []
        run = self._forced_run()
        if not run or limit <= len(run):
            return run[:limit]
        self._go_to(run)
        return [*run, self._eos_token_ids[0]] if self._matcher.is_stopped() else list(run)

    def _forced_run(self) -> list[int]:
        """Tokens that follow for certain: a mask would allow each alone, behind the ones before."""
        if self._run is None:
            self._go_to(())
            self._run = self._runs.steady(self._matcher, self._last, self._forced_tokens())
        return self._run

    def _forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _go_to(self, token_ids: Sequence[int]) -> None:
        """Have these tokens ahead, or as many of them as can follow."""
        ahead, common = self._ahead, 0
        for one, other in zip(ahead, token_ids):
            if one != other:
                break
            common += 1
        if common < len(ahead):
            self._matcher.rollback(len(ahead) - common)
            del ahead[common:]
        if common < len(token_ids):
            rest = list(token_ids[common:])
            ahead += rest[: self._matcher.try_consume_tokens(self.known_ids(rest))]


def reason(matcher: Any) -> str:
    """Why a matcher that began without an error has one."""
    error = shown(matcher.get_error())
    return f"{BEYOND_LIMITS if error.startswith(_LIMIT_ERRORS) else 'the grammar cannot go on'}: {error}"


def shown(error: str) -> str:
    """The library's message, without the state of its parser."""
    return " ".join(error.partition("\n<state>")[0].split())[:500] or "unknown error"
