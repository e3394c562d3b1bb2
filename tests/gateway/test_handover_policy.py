"""Prompts that are handed over: never some, others by the cache and by what pays."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from handover_pair import IDS, Pair, first, request

from inflight_gateway import handover_policy
from inflight_gateway.handover_policy import Costs, Prompt, SentPrefixes, can_be_handed_over, pays

NEVER: list[dict[str, Any]] = [
    {"n": 2},
    {"extra_parameters": {"num_return_sequences": 2}},
    {"max_tokens": 1},
    {"prompt_logprobs": 0},
    {"resume_token_ids": [4], "seed": 1},
    {"extra_parameters": {"output_kind": 0}},
]


@pytest.mark.parametrize("options", NEVER)
def test_some_requests_are_never_handed_over(options: dict[str, Any]) -> None:
    assert not can_be_handed_over(request(**options))
    assert can_be_handed_over(request(max_tokens=2, logprobs=3, stop=["x"], seed=4))


async def test_short_and_cached_prompts_are_not_handed_over() -> None:
    pair = Pair(lambda _: [first()], handover="300")
    await pair.run(IDS)
    assert not pair.outcomes
    await pair.run([*IDS, 1])  # 256 of them are likely cached
    assert not pair.outcomes
    await pair.run([*IDS, 1], tenant="other")
    assert pair.outcomes == ["handed_over"]


# -- what is likely cached -----------------------------------------------------------------


def test_prompts_that_begin_alike_have_been_sent() -> None:
    sent, long = SentPrefixes(), "abcd" * 1000
    assert sent.sent(request(long)) == Prompt(1000, 0)
    assert sent.sent(request(long + "e")) == Prompt(1000, 768)
    assert sent.sent(request("e" + long)) == Prompt(1000, 0)
    turns = [{"role": "user", "content": long}]
    assert sent.sent(request(turns)).cached == 0
    assert sent.sent(request([*turns, {"role": "assistant", "content": "Two"}])).cached == 768
    for other in ({"tenant": "a"}, {"cache_salt": "a"}, {"adapter": "a"}):
        assert sent.sent(request(long, **other)).cached == 0
    assert sent.sent(request(list(range(600)))) == Prompt(600, 0)
    assert sent.sent(request(list(range(520)))) == Prompt(520, 512)


def test_few_pieces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_policy, "_REMEMBERED", 3)
    sent = SentPrefixes()
    for start in (0, 10_000):
        sent.sent(request(list(range(start, start + 512))))
    assert sent.sent(request(list(range(512)))).cached == 0


# -- what pays -----------------------------------------------------------------------------


def test_auto_compares_what_was_measured() -> None:
    costs = Costs()
    assert pays(costs, 0, 256, 10_000) and not pays(costs, 0, 255, 0), "nothing is measured"
    costs.alone.add(0, 0.001)
    assert pays(costs, 0, 1000, 0)
    costs.transfer.add(0, 0.5)
    assert pays(costs, 0, 501, 0) and not pays(costs, 0, 499, 0)
    costs.prefill.add(0, 0.0005)
    assert pays(costs, 0, 1000, 1999) and not pays(costs, 0, 1000, 2001), "its queue is too long"
    assert pays(costs, 61, 256, 0), "what was measured a minute ago tells nothing"


async def test_auto_measures_prompts_and_handovers() -> None:
    pair = Pair(lambda _: [first(cached=0)], handover="auto")
    costs = pair.upstream._costs["demo"]
    await pair.run()
    assert pair.outcomes == ["handed_over"]
    assert costs.prefill.median(1e-9) and costs.transfer.median(1e-9) is not None and costs.alone.median(0) is None
    for _ in range(2):
        costs.transfer.add(time.monotonic(), 1e9)
    await pair.run(list(range(1000, 1300)))
    assert pair.outcomes == ["handed_over"] and costs.alone.median(1e-9)
    await pair.run([1, 2, 3])
    assert pair.decode.requests[-1].input_ids == [1, 2, 3]


def test_the_patience_is_bounded_and_counts_cached_tokens() -> None:
    costs = Costs()
    assert costs.patience(0, 10**9) == 10
    costs.prefill.add(0, 0.001)
    assert [costs.patience(0, tokens) for tokens in (10, 1000, 10**9)] == [1.0, 3.0, 30.0]
    costs.was_late(0, 0.1, 1000)
    assert costs.patience(0, 1000) == 3.0, "too little time tells nothing"
    for _ in range(9):
        costs.was_late(0, 3.0, 1000)
    assert costs.patience(0, 1000) == pytest.approx(9.0)


async def test_a_prompt_that_is_cached_has_the_patience_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Costs, "patience", lambda _, __, tokens: asked.append(tokens) or 9.0)
    pair = Pair(lambda _: [first(), asyncio.Event()], handover="10")
    await pair.run(list(range(512)))
    await pair.run(list(range(550)))
    assert asked == [512, 550]
