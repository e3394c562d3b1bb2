"""Accumulating chunks, and the arithmetic of the timings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_client.results import ChoiceDelta, Logprob, ResultBuilder, StreamChunk


def chunk(elapsed: float, *token_counts: int, reason: str | None = None) -> StreamChunk:
    deltas = [
        ChoiceDelta(index, "x" * count, list(range(count)), count, reason) for index, count in enumerate(token_counts)
    ]
    return StreamChunk(deltas, num_input_tokens=4, elapsed=elapsed)


def test_timings_of_a_plain_stream() -> None:
    builder = ResultBuilder(1)
    for elapsed in (0.5, 0.6, 0.8):
        builder.add(chunk(elapsed, 1))
    timings = builder.timings(total=0.9)
    assert timings.ttft == 0.5
    assert timings.itl == pytest.approx([0.1, 0.2])
    assert timings.tpot == pytest.approx(0.15)
    assert timings.total == 0.9


def test_tpot_counts_tokens_and_not_responses() -> None:
    builder = ResultBuilder(1)
    builder.add(chunk(1.0, 1))
    builder.add(chunk(2.0, 4))  # four tokens in one response
    timings = builder.timings(2.0)
    assert timings.itl == [1.0]
    assert timings.tpot == pytest.approx(0.25)


def test_tpot_is_that_of_the_longest_sequence() -> None:
    builder = ResultBuilder(2)
    builder.add(chunk(1.0, 1, 1))
    builder.add(chunk(3.0, 2, 0))
    assert builder.timings(3.0).tpot == pytest.approx(1.0)


def test_responses_without_tokens_do_not_count_in_the_timings() -> None:
    builder = ResultBuilder(1)
    builder.add(chunk(1.0, 0))
    builder.add(chunk(2.0, 1))
    builder.add(chunk(5.0, 0, reason="stop"))
    timings = builder.timings(5.0)
    assert (timings.ttft, timings.itl, timings.tpot) == (2.0, [], None)


def test_a_result_without_output() -> None:
    result = ResultBuilder(2).build("r", "m", 1, 0.25)
    assert (result.timings.ttft, result.timings.itl, result.timings.tpot) == (None, [], None)
    assert [choice.text for choice in result.choices] == ["", ""]
    assert (result.usage.input_tokens, result.usage.output_tokens) == (None, 0)


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 5)), min_size=2, max_size=30))
def test_timings_add_up(gaps: list[tuple[float, int]]) -> None:
    builder, now, tokens = ResultBuilder(1), 0.0, 0
    for gap, count in gaps:
        now, tokens = now + gap, tokens + count
        builder.add(chunk(now, count))
    timings = builder.timings(now)
    assert timings.ttft == gaps[0][0] and timings.tpot is not None
    assert timings.ttft + sum(timings.itl) == pytest.approx(timings.total)
    assert timings.tpot * (tokens - 1) == pytest.approx(sum(timings.itl))


def test_chunks_add_up_per_sequence() -> None:
    builder = ResultBuilder(2)
    logprobs = [{7: Logprob(-0.5, 1, "a")}]
    builder.add(StreamChunk([ChoiceDelta(0, "a", [7], 1, None, logprobs, -0.5), ChoiceDelta(1, "b", [8], 1)]))
    builder.add(StreamChunk([ChoiceDelta(0, "c", [9], 1, "length", logprobs, -1.0), ChoiceDelta(1, "", [], 0, "stop")]))
    first, second = builder.build("r", "m", 1, 0.0).choices
    assert (first.text, first.token_ids, first.finish_reason) == ("ac", [7, 9], "length")
    assert (second.text, second.token_ids, second.finish_reason) == ("b", [8], "stop")
    assert first.logprobs == logprobs * 2
    assert first.cumulative_logprob == -1.0


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    builder = ResultBuilder(1)
    assert builder.build("r", "m", 1, 0.0).usage.cached_tokens is None
    for cached in (0, 16, None):
        builder.add(StreamChunk([ChoiceDelta(0, "a", [7], 1)], num_cached_tokens=cached))
    assert builder.build("r", "m", 2, 0.0).usage.cached_tokens == 0


def test_a_result_can_be_encoded_as_json() -> None:
    builder = ResultBuilder(1)
    builder.add(StreamChunk([ChoiceDelta(0, "a", [7], 1, "stop", [{7: Logprob(-0.5, 1, "a")}])], elapsed=0.5))
    values = json.loads(json.dumps(builder.build("r", "m", 1, 0.5).to_dict()))
    assert values["choices"][0]["logprobs"][0]["7"]["logprob"] == -0.5
    assert values["timings"]["ttft"] == 0.5
