"""Stop strings in a growing text: compared with their definition, and with how long they take."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.text import stop_strings
from inflight.frontend.text.stop_strings import StopChecker, StopStrings


def stopped(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Reference: searches the whole text, character by character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab你😀", max_size=30),
    stop=st.lists(st.text("ab你😀", min_size=1, max_size=4), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    checker = StopChecker(StopStrings(stop), include)
    shown, match = "", None
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for a, b in pairwise(edges):
        new, match = checker.push(text[a:b])
        shown += new
        if match is not None:
            break
        expected_hold = next(
            (k for k in range(3, 0, -1) if any(s[:k] == text[:b][-k:] and k < len(s) for s in stop)), 0
        )
        assert len(shown) >= b - expected_hold, "more is held back than can become a stop string"
    assert (shown + ("" if match else checker.flush()), match) == stopped(text, stop, include)


def test_held_text_that_does_not_match_is_released_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,095 times "a" may become the stop string 4,095 places long; "c" ends all of them at once."""
    stop = StopStrings(["a" * 4096, "b"])
    checker = StopChecker(stop)
    looked: list[int] = []
    monkeypatch.setattr(stop_strings, "bisect_left", lambda texts, text: looked.append(1) or bisect_left(texts, text))

    assert checker.push("a" * 4095) == ("", None)
    shown = ""
    for _ in range(4096):
        looked.clear()
        new, match = checker.push("c")
        assert len(looked) <= 65 and match is None
        shown += new
        if not checker._held:
            break
    assert shown + checker.flush() == "a" * 4095 + shown[4095:], "nothing is lost"
    assert set(shown[4095:]) == {"c"}
    assert checker.push("aab") == ("aa", "b")


def test_sequences_share_their_stop_strings() -> None:
    stop = StopStrings(["stop", "top!"])
    one, other = StopChecker(stop), StopChecker(stop, include_stop_str=True)
    assert one.push("a sto") == ("a ", None)
    assert other.push("to") == ("", None)
    assert one.push("p!") == ("", "stop")
    assert other.push("p!") == ("top!", "top!")
