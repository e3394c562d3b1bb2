"""When responses wait, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.frontend.output.pacing import Pacing, pacing_for


def steady(cores: int, num_streams: int, cost: float) -> Pacing:
    """After some hundred steps and responses alike."""
    pacing = Pacing(cores)
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
    pacing = Pacing(cores)
    for num_streams, seconds in seen:
        pacing.step(num_streams)
        pacing.sent(seconds)
    due = pacing.due(SimpleNamespace(sent_time=1.0, num_new_tokens=num_tokens), 1.0 + since)
    assert due is None or (1.0 + since < due <= 1.0 + 0.125 + 1e-9 and num_tokens < 8)


def test_only_a_cpu_engine_with_auto_is_paced() -> None:
    auto = EngineConfig(model="m", cpu_threads=2)
    assert isinstance(pacing_for(auto, "cpu"), Pacing)
    assert pacing_for(auto, "cuda:0") is None
    assert pacing_for(EngineConfig(model="m", stream_interval=1), "cpu") is None
