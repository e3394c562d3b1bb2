"""Forced texts by a tokenizer that does not go on as it began: what is settled is what masks admit, one by one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from zlib import crc32

import pytest

from inflight.grammars import guidance, guided_sequence
from inflight.grammars.base import MaskJob
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.guided_sequence import GuidedSequence, SteadyRuns
from inflight.grammars.spec import BEYOND_LIMITS, GrammarSpec
from inflight.grammars.vocabulary import Vocabulary, read_vocabulary

from .conftest import DEMO, EOS, VOCAB
from .test_guidance import allowed

TEXT = "the quick brown fox jumps over the lazy dog"
LONG = " ".join(f"{TEXT} {number}" for number in range(9))
SPECS = [
    GrammarSpec("choice", json.dumps([TEXT])),
    GrammarSpec("choice", json.dumps([f"{LONG} of one", f"{LONG} or of another"])),
    GrammarSpec("regex", f"{TEXT}(s|ged)?"),
    GrammarSpec("regex", f"(1|2){TEXT}(3|4){TEXT}"),
    GrammarSpec("json_schema", json.dumps({"type": "object", "additionalProperties": False,
                                           "required": ["quick", "brown fox"],
                                           "properties": {"quick": {"enum": [TEXT, LONG]},
                                                          "brown fox": {"type": "boolean"}}}), ""),
]  # fmt: skip


def unsteady(one_in: int, monkeypatch: pytest.MonkeyPatch) -> GuidanceGrammars:
    """The demo model's tokenizer, but of one text in so many it writes the first token as bytes."""

    def read(text: str) -> Vocabulary:
        vocabulary = read_vocabulary(text)
        of_byte = {data: token for token, data in enumerate(vocabulary.tokens) if len(data) == 1}

        def encode(text: str) -> list[int]:
            ids = vocabulary.encode(text)
            if not ids or crc32(text.encode()) % one_in:
                return ids
            return [*(of_byte[bytes([byte])] for byte in vocabulary.tokens[ids[0]]), *ids[1:]]

        return replace(vocabulary, encode=encode)

    monkeypatch.setattr(guidance, "read_vocabulary", read)
    return GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])


def by_masks(grammars: GuidanceGrammars, spec: GrammarSpec, taken: list[int]) -> tuple[list[int], set[int]]:
    """The tokens that masks admit alone behind `taken`, and the choice behind them."""
    walk, alone = grammars.new(spec), list[int]()
    walk.advance(taken)
    while True:
        (possible,) = allowed(grammars, MaskJob(walk, 0, []), in_background=False)
        if len(possible) > 1 or possible == {EOS}:
            return alone, possible
        alone += possible
        walk.advance(alone[-1:])


def compare(grammars: GuidanceGrammars, spec: GrammarSpec, seed: int) -> tuple[int, int]:
    """Of a whole answer: how many runs were shorter than the tokenizer's, and the longest one that masks admit."""
    sequence, taken, cut, longest, choose = grammars.new(spec), list[int](), 0, 0, random.Random(seed)
    while True:
        expected, possible = by_masks(grammars, spec, taken)
        longest = max(longest, len(expected))
        forced = [token for token in sequence.forced(1000) if token != EOS]
        assert forced == expected[: len(forced)] and len(forced) <= guided_sequence._MAX_FORCED
        assert bool(forced) == bool(expected)
        cut += len(forced) < min(len(expected), guided_sequence._MAX_FORCED)
        for drafts in (expected, forced, expected[: len(expected) // 2], [9]):
            right = [*expected, None][: len(drafts) + 1] if drafts == expected[: len(drafts)] else expected[:1]
            right = [token for token in right if token is not None]
            chosen = [7] * (len(drafts) + 1)
            settled = sequence.settle(drafts, chosen, [False] * len(chosen))
            assert chosen[: len(right)] == right
            assert settled == (len(chosen) if drafts != expected[: len(drafts)] and expected else len(right))
        if possible == {EOS}:
            return cut, longest
        taken += [*expected, choose.choice(sorted(possible - {EOS}))]
        sequence.advance(taken[sequence.num_tokens :])
        assert not sequence.error


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The runs that are followed from now on."""
    found, follow = [], guided_sequence._follow
    monkeypatch.setattr(
        guided_sequence, "_follow", lambda matcher, tokens: found.append(tokens) or follow(matcher, tokens)
    )
    return found


@pytest.mark.parametrize("one_in", [4, 40])
def test_what_is_settled_is_what_masks_admit(
    one_in: int, followed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are cut, of more than 64 tokens, and found again in the same grammar and in another one."""
    grammars = unsteady(one_in, monkeypatch)
    found = [compare(grammars, spec, seed=1) for spec in SPECS]
    assert any(cut for cut, _ in found) == (one_in == 4), "the rare one is behind 64 tokens"
    assert max(longest for _, longest in found) > 2 * guided_sequence._MAX_FORCED
    followed.clear()
    again = GrammarSpec("choice", json.dumps([TEXT, f"{TEXT}?"]))
    assert [compare(grammars, spec, seed=1) for spec in SPECS] == found and not followed
    compare(grammars, again, seed=1)
    assert len(followed) <= 1, "but for its end, the text is known"


def test_runs_are_forgotten_before_there_are_too_many(
    followed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided_sequence, "_MAX_RUNS", 3)
    grammars = unsteady(4, monkeypatch)
    for _ in range(2):
        for spec in SPECS:
            followed.clear()
            compare(grammars, spec, seed=1)
            assert len(grammars._runs._lengths) <= 3
    assert followed, "which were known before"


class Limited:
    """An `LLMatcher` of the tokens 1, 2, 3, which reaches a limit at the third."""

    def __init__(self) -> None:
        self._taken = 0

    def compute_ff_bytes(self) -> bytes:
        return b"abc"

    def compute_ff_tokens(self) -> list[int]:
        return [] if self.is_error() else [1, 2, 3][self._taken :]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._taken += 0 if self.is_error() else len(tokens)
        return 0 if self.is_error() else len(tokens)

    def rollback(self, count: int) -> None:
        self._taken -= 0 if self.is_error() else count

    def is_error(self) -> bool:
        return self._taken == 3

    def is_stopped(self) -> bool:
        return self.is_error()

    def get_error(self) -> str:
        return "parser error: too many items"


def test_nothing_is_forced_where_following_it_reaches_a_limit() -> None:
    """The matcher is of no more use; the mask says why."""
    runs = SteadyRuns()
    sequence = GuidedSequence(Limited(), VOCAB, [EOS], runs)
    chosen = [7, 7]
    assert sequence.settle([1], chosen, [False, False]) == 0 and chosen == [7, 7]
    assert sequence.forced(9) == [] and not runs._lengths
    sequence.check()
    assert sequence.error.startswith(BEYOND_LIMITS)
