"""The engine's answer to `GetStats`."""

from __future__ import annotations

import msgspec
from engine_rig import Info, make_core

from inflight.engine.messages import AddRequest
from inflight.engine.operator_stats import engine_stats
from inflight.engine.sampling_params import SamplingParams


def add(core, request_id: int, tenant: str = "", n: int = 1) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=0, n=n)
    assert core.add_request(AddRequest(request_id, [5, 6, 7], params, tenant=tenant)) is None


def test_the_answer_is_the_present_state_and_can_be_sent() -> None:
    core = make_core(Info(), max_num_seqs=2)
    for k in range(3):
        add(core, k)
    before = engine_stats(core, 0.0)
    assert (before["load"]["running"], before["load"]["waiting"]) == (0, 3)
    core.step()
    found = engine_stats(core, 0.0)
    assert (found["load"]["running"], found["load"]["waiting"]) == (2, 1)
    assert found["load"]["blocks_used"] == core.pool.num_used > 0
    assert found["tenants"] is None and found["num_tenants"] is None
    assert (found["async_scheduling"], found["max_num_batched_tokens"]) == (False, core.config.step_tokens)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found


def test_tenants_are_counted_separately_and_their_number_is_bounded() -> None:
    core = make_core(Info(), max_num_seqs=2, tenants={"*": {"per_name": True}}, max_queue_size=0)
    add(core, 0, "big", n=3)
    for k in range(1, 151):
        add(core, k, f"t{k}")
    core.step()
    found = engine_stats(core, 0.0)
    assert found["num_tenants"] == 151 and len(found["tenants"]) == 100
    assert sum(found["tenants"]["big"].values()) == 3, "the busiest come first"
    assert all(min(counts.values()) >= 0 for counts in found["tenants"].values())
