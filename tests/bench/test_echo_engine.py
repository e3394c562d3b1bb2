"""The engine without a model of bench/sending.py: it needs every fact of a model that the core asks for."""

from __future__ import annotations

from echo_engine import TOKEN, IdleRunner

from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams


def test_it_makes_the_tokens_of_a_request() -> None:
    core = make_core(EngineConfig(model="none"), IdleRunner(0.0))
    core.add_request(AddRequest(1, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
    tokens: list[int] = []
    for _ in range(10):
        tokens += [token for delta in core.step().deltas for token in delta.token_ids]
    assert tokens == [TOKEN] * 4
