"""When responses wait, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.frontend.output.pacing import Pacing, pacing_for


def steady(cores: int, num_streams: int, cost: float, device: str = "cpu") -> Pacing:
    """After some hundred steps and responses alike."""
    pacing = pacing_for(EngineConfig(model="m", cpu_threads=cores), device)
    assert pacing is not None
    for _ in range(300):
        pacing.step(num_streams)
        pacing.sent(cost)
    return pacing


def test_the_wait_keeps_sending_within_its_share_of_the_cores() -> None:
    wait = steady(2, 4, 0.0003).wait
    assert wait == pytest.approx(4 * 0.0003 / (2 * 0.03), rel=0.01)
    assert steady(2, 8, 0.0003).wait == pytest.approx(2 * wait, rel=0.01)
    assert steady(4, 8, 0.0003).wait == pytest.approx(wait, rel=0.01)
    assert steady(1, 64, 0.0003).wait == 0.1


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10)), max_size=20),
    st.floats(0, 1),
    st.integers(0, 20),
)
def test_nothing_waits_longer_than_an_eighth_of_a_second_or_for_more_than_8_tokens(
    cores: int, seen: list[tuple[int, float]], since: float, num_tokens: int
) -> None:
    pacing = Pacing(0.03 * cores)
    for num_streams, seconds in seen:
        pacing.step(num_streams)
        pacing.sent(seconds)
    due = pacing.due(SimpleNamespace(sent_time=1.0, num_new_tokens=num_tokens), 1.0 + since)
    assert due is None or (1.0 + since < due <= 1.0 + 0.125 + 1e-9 and num_tokens < 8)


def test_an_engine_on_a_device_leaves_the_sender_most_of_a_core() -> None:
    assert steady(2, 64, 0.0001, "cuda:0").wait == pytest.approx(64 * 0.0001 / 0.7, rel=0.01)
    assert steady(9, 64, 0.0001, "cuda:0").wait == steady(2, 64, 0.0001, "cuda:0").wait
    assert steady(2, 1000, 0.0003, "cuda:0").wait == 0.04


def test_few_streams_of_a_device_get_every_token_at_once() -> None:
    pacing = steady(2, 32, 0.0002, "cuda:0")
    assert pacing.due(SimpleNamespace(sent_time=1.0, num_new_tokens=1), 1.012) is None


def test_many_streams_of_a_device_get_several_tokens_at_once_within_50_ms() -> None:
    pacing = steady(2, 256, 0.0001, "cuda:0")
    steps = [1.0 + 0.012 * number for number in range(1, 9)]
    due = [pacing.due(SimpleNamespace(sent_time=1.0, num_new_tokens=n), now) for n, now in enumerate(steps, 1)]
    assert due.index(None) + 1 == 3, "tokens of a response"
    assert all(one <= 1.0 + 0.05 for one in due if one is not None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_only_auto_is_paced(device: str) -> None:
    assert isinstance(pacing_for(EngineConfig(model="m", cpu_threads=2), device), Pacing)
    assert pacing_for(EngineConfig(model="m", stream_interval=1), device) is None
