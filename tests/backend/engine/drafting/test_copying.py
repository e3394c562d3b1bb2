"""Earlier occurrences of the last tokens, and the tokens that followed them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inflight.engine.drafting import lookup_drafter as copying
from inflight.engine.drafting.lookup_drafter import Guess, LookupGuesser
from inflight.engine.drafting.token_index import Occurrences, match_length
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.speculative import SpeculativeConfig

texts = st.lists(st.integers(0, 3), max_size=200)


@example([1, 2, 3] * 40, [10, 90], 2, 9)  # one by one first, then at once
@given(texts, st.lists(st.integers(0, 90), max_size=4), st.integers(1, 4), st.integers(1, 9))
def test_the_places_after_equal_runs(text: list[int], pieces: list[int], width: int, limit: int) -> None:
    """For sorted tokens, and for tokens added one by one."""
    tokens = array("i")
    places = Occurrences(tokens, width)
    for piece in [*pieces, len(text)]:
        tokens.extend(text[len(tokens) : len(tokens) + piece])
        places.learn(len(tokens))
    for end in range(width, len(tokens) + 1):
        run = tokens[end - width : end]
        wanted = [place for place in range(len(tokens), width - 1, -1) if tokens[place - width : place] == run]
        assert places.behind(places.key(run), limit) == wanted[:limit]
    assert places.behind(places.key([7] * width), limit) == []


@given(texts, texts, st.integers(1, 20))
def test_the_length_of_a_match(text: list[int], context: list[int], limit: int) -> None:
    for place in range(len(text) + 1):
        length = match_length(text, place, context, limit)
        assert text[place - length : place] == context[len(context) - length :]
        assert length <= limit
        longer = length + 1
        if longer <= min(limit, place, len(context)):
            assert text[place - longer : place] != context[len(context) - longer :]


def request(prompt: Sequence[int], output: Sequence[int] = (), number: int = 0, **fields: Any) -> Request:
    made = Request(number, prompt, SamplingParams(max_tokens=100), **fields)
    made.token_ids.extend(output)
    made.num_tokens = len(made.token_ids)
    return made


def guess(drafts: LookupGuesser, of: Request, limit: int = 16) -> Guess:
    found = drafts.guess(of, limit)
    assert found is not None
    return found


def suffix(**options: Any) -> LookupGuesser:
    return LookupGuesser(SpeculativeConfig(method="suffix", **options))


def test_the_longest_match_is_copied() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 9, 3, 4, 8, 8, 8, 2, 3, 4]
    found = guess(suffix(suffix_decoding_max_spec_factor=2), request(text))
    assert (found.tokens, found.match) == ([5, 6, 9, 9, 3, 4], 3), "twice as long as the match"
    assert found.shares == [1.0] * 6
    ngram = LookupGuesser(SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=2))
    found = guess(ngram, request(text), 5)
    assert (found.tokens, found.match) == ([8, 8, 8, 2, 3], 2), "the latest of the matches that count as equal"
    ngram = LookupGuesser(SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    assert guess(ngram, request(text), 5).tokens == [5, 6, 9, 9, 3], "an earlier one, which is longer"


def test_a_long_match_counts_as_what_it_is() -> None:
    """Beyond the longest one that is searched for: launched ahead, no draft after five tokens would be worth it."""
    ngram = LookupGuesser(SpeculativeConfig(method="ngram"))
    copied = list(range(100, 120))
    assert guess(ngram, request([*copied, 1, 2, *copied])).match == 16
    assert guess(ngram, request([*copied, 1, 2, *copied[-7:]])).match == 7


def test_nothing_is_guessed_where_nothing_matches() -> None:
    assert suffix().guess(request([1, 2, 3, 4, 5]), 8) is None
    assert suffix().guess(request([1, 1]), 8) is None, "there is no room for another place"
    wide = LookupGuesser(SpeculativeConfig(method="ngram", prompt_lookup_min=3, prompt_lookup_max=5))
    assert wide.guess(request([1, 2, 9, 1, 2]), 8) is None


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    found = guess(suffix(suffix_decoding_max_spec_factor=100), request([5, 1, 2, 3, 1, 2, 3, 1, 2, 3]), 7)
    assert found.tokens == [1, 2, 3, 1, 2, 3, 1]


def test_after_a_differing_token_the_copy_continues_past_it() -> None:
    drafts, text = suffix(), list(range(20, 40))
    of = request(text, [21, 22, 23])
    assert guess(drafts, of, 3).tokens == [24, 25, 26]
    for token in (24, 99):
        of.token_ids.append(token)
        of.num_tokens += 1
    found = guess(drafts, of, 3)
    assert (found.tokens, found.match) == ([26, 27, 28], 0)
    ngram = LookupGuesser(SpeculativeConfig(method="ngram"))
    of = request(text, [21, 22, 23])
    guess(ngram, of, 3)
    of.token_ids.append(99)
    of.num_tokens += 1
    assert ngram.guess(of, 3) is None


def test_places_that_differ_vote() -> None:
    text = [7, 8, 1, 4, 9, 7, 8, 1, 5, 9, 7, 8, 1, 4, 6, 7, 8]
    found = guess(suffix(), request(text), 4)
    assert found.tokens[:2] == [1, 4]
    assert found.shares[:3] == [1.0, 2 / 3, 1 / 2]
    few = guess(suffix(suffix_decoding_min_token_prob=0.7), request(text), 4)
    assert few.tokens == [1], "a continuation of only two in three is not likely enough"


def test_past_outputs_of_the_tenant_and_salt_alone() -> None:
    drafts = suffix()
    first = request([1, 2, 3], [40, 41, 42, 43, 44], tenant="a", cache_salts=("s",))
    drafts.guess(first, 4)
    drafts.ended(first)
    asking = {"prompt": [9, 9, 9, 40, 41], "number": 1}
    assert guess(drafts, request(**asking, tenant="a", cache_salts=("s",)), 4).tokens == [42, 43, 44]
    assert drafts.guess(request(**asking, tenant="b", cache_salts=("s",)), 4) is None
    assert drafts.guess(request(**asking, tenant="a", cache_salts=""), 4) is None
    assert drafts.guess(request([9, 1, 2], number=2, tenant="a", cache_salts=("s",)), 4) is None, "prompts are not kept"
    none = suffix(suffix_decoding_max_cached_requests=0)
    none.guess(first, 4)
    none.ended(first)
    assert none.guess(request(**asking, tenant="a", cache_salts=("s",)), 4) is None


def test_old_outputs_are_forgotten_first_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_HALF", 20)
    monkeypatch.setattr(copying, "_MAX_PAST_TOKENS", 100)
    drafts = suffix()

    def end(number: int, tenant: str) -> None:
        one = request([0, 0, 0], [number, number + 1000, 5, 6, 7], number=number, tenant=tenant)
        drafts.guess(one, 4)
        drafts.ended(one)

    def known(number: int, tenant: str) -> bool:
        asking = request([8, 8, number, number + 1000], number=-1, tenant=tenant)
        found = drafts.guess(asking, 3)
        drafts._own.clear()
        drafts._sources.clear()
        return found is not None and found.tokens == [5, 6, 7]

    for number in range(100, 120):
        end(number, "a")
    assert [known(number, "a") for number in (100, 111, 112, 119)] == [False, False, True, True]
    assert sum(past.num_tokens for past in drafts._past.values()) <= 2 * (20 + 6)
    for number in range(200, 230):
        end(number, f"tenant {number}")
    assert sum(past.num_tokens for past in drafts._past.values()) <= 100
    assert known(229, "tenant 229") and not known(119, "a")
    assert not drafts._own and not drafts._sources


@given(st.lists(st.lists(st.integers(0, 4), max_size=90), min_size=1, max_size=5), st.integers(1, 20))
def test_a_guess_occurred_somewhere_after_the_match(outputs: list[list[int]], limit: int) -> None:
    drafts = suffix(suffix_decoding_min_token_prob=0.0)
    seen: list[list[int]] = []
    for number, output in enumerate(outputs):
        one = request([number % 5], (), number)
        for token in output:
            found = drafts.guess(one, limit)
            if found is not None:
                assert 1 <= len(found.tokens) <= limit
                known = one.token_ids.tolist()
                tail = known[len(known) - found.match :]  # empty where a copy continues past a differing token
                texts = [*seen, known + found.tokens[:-1]]  # it can continue with its own guess
                first = [*tail, found.tokens[0]]
                assert any(
                    text[i : i + len(first)] == first for text in texts for i in range(len(text) - len(first) + 1)
                )
            one.token_ids.append(token)
            one.num_tokens += 1
        drafts.guess(one, limit)
        drafts.ended(one)
        seen.append(output)
