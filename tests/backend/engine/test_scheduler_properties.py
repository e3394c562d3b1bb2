"""Hypothesis drives scheduler and pool through arrivals, aborts and exhaustion (invariants 1-4, 6)."""

from __future__ import annotations

from drafters import KINDS, HashDrafter, add_gate
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.integrity import check_core
from inflight.engine.sampling_params import SamplingParams

prompts = st.lists(st.integers(0, 5), min_size=1, max_size=40)  # few distinct ids: prefixes collide often

memory_policies = st.fixed_dictionaries(
    {
        "admission": st.sampled_from(["free_blocks", "predicted_peak"]),
        "watermark": st.sampled_from([0, 0.01, 0.3]),
        "preemption_victim": st.sampled_from(["last", "lowest_priority", "longest", "least_preempted"]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "swap_space": st.just("1MiB"),
        "shared_step_rows": st.sampled_from([None, 1, 2, 4]),
        "short_prompt_share": st.sampled_from([0, 0.25, 0.9]),
    }
)
host_blocks = st.sampled_from([0, 1, 5, 1000])
drafters = st.one_of(st.none(), st.builds(HashDrafter, st.sampled_from(KINDS), st.integers(1, 9)))

order_policies = st.fixed_dictionaries(
    {"scheduling_policy": st.sampled_from(["fcfs", "priority", "sjf", "edf"])},
    optional={
        "priority_aging_seconds": st.sampled_from([1, 3]),
        "tenants": st.sampled_from([{"*": {}}, {"a": {"weight": 3, "max_running": 2}, "b": {"max_running": 1}}]),
    },
)
scheduling_fields = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from(["a", "b", "c"]),
        "deadline": st.integers(0, 40).map(lambda seconds: 1e9 + seconds),  # none passes while it waits
    },
)


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 64]))
    need = -(-64 // block_size)
    return {
        "block_size": block_size,
        "num_blocks": draw(st.integers(need, need * 4)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 7, 16, 64, 2048])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 8, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "memory": draw(memory_policies),
        "order": draw(order_policies),
        "num_host_blocks": draw(host_blocks),
        "drafter": draw(drafters),
        "arrivals": draw(
            st.lists(
                st.tuples(
                    st.integers(0, 6),  # steps before it arrives
                    prompts,
                    st.integers(1, 30),  # max_tokens
                    st.sampled_from([1, 1, 2, 3, 9]),  # n
                    st.booleans(),  # ignore_eos
                    # steps until it is aborted, and which of its sequences
                    st.one_of(st.none(), st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 8)))),
                    scheduling_fields,
                    st.one_of(st.just(0), st.integers(0, 20)),  # output tokens that it arrives with
                    st.one_of(st.just(0), st.integers(0, 5)),  # times that admission answers "not yet"
                ),
                min_size=1,
                max_size=12,
            )
        ),
    }


@given(workloads())
def test_every_request_ends_once_with_exactly_its_tokens(load):
    info = Info(num_blocks=load["num_blocks"], num_host_blocks=load["num_host_blocks"])
    options = ("block_size", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "async_scheduling")
    core = make_core(info, **{key: load[key] for key in options}, **load["memory"], **load["order"])
    core.scheduler.policies.drafter = load["drafter"]
    gate = add_gate(core, {})
    outputs: dict = {}
    reasons: dict = {}
    expected: dict = {}
    aborts: list[tuple[int, int, int | None]] = []
    aborted: set[tuple[int, int]] = set()
    step = 0

    def abort(victim: int, index: int | None) -> None:
        if index is None or (victim, index) in outputs:  # one that has no output yet has no stop string either
            core.abort(victim, index)
            check_core(core)
            aborted.update((victim, one) for one in (range(9) if index is None else [index]))

    for request_id, arrival in enumerate(load["arrivals"]):
        gap, prompt, max_tokens, n, ignore_eos, abort_after, fields, num_given, waits = arrival
        for _ in range(gap):
            collect(core, outputs, reasons)
            step += 1
            for due, victim, index in aborts:
                if due == step:
                    abort(victim, index)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        tokens, reason = expected_output(prompt, params, info)
        given = tokens[: min(num_given, len(tokens) - 1)]
        resumed = [given if index % 2 == 0 else [] for index in range(n)] if given else []
        fields = {"arrival": float(step), "output_token_ids": resumed, **fields}
        gate.waits[request_id] = waits
        add(core, request_id, prompt, fields, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos)
        for index in range(n):
            expected[request_id, index] = tokens[len(resumed[index]) if resumed else 0 :], reason
        if abort_after is not None:
            aborts.append((step + abort_after[0], request_id, abort_after[1]))
    for due, victim, index in sorted(aborts, key=lambda abort: abort[:2]):
        while step < due and core.has_work:
            collect(core, outputs, reasons)
            step += 1
        abort(victim, index)
    run_until_idle(core, outputs, reasons)
    for key, (tokens, reason) in expected.items():
        if key in aborted and key not in reasons:
            assert tokens[: len(outputs.get(key, []))] == outputs.get(key, [])
            continue
        assert outputs[key] == tokens
        assert reasons[key] == reason


@given(
    st.lists(st.tuples(prompts, st.integers(1, 24)), min_size=2, max_size=10),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 5, 64]),
    st.booleans(),
    memory_policies,
    order_policies,
    host_blocks,
    drafters,
)
def test_a_pool_that_holds_one_request_still_serves_all(
    requests, block_size, budget, overlap, memory, order, num_host_blocks, drafter
):
    """Blocks for a single request of max_model_len: constant preemption, no deadlock, the same tokens."""
    info = Info(num_blocks=64 // block_size, num_host_blocks=num_host_blocks)
    options = {"block_size": block_size, "max_num_batched_tokens": budget, "async_scheduling": overlap}
    core = make_core(info, max_num_seqs=8, **options, **memory, **order)
    core.scheduler.policies.drafter = drafter
    outputs: dict = {}
    reasons: dict = {}
    expected = {}
    for request_id, (prompt, max_tokens) in enumerate(requests):
        fields = {"arrival": 0.0, "priority": -request_id % 3, "tenant": "abc"[request_id % 3]}
        params = add(core, request_id, prompt, fields, max_tokens=max_tokens, ignore_eos=True)
        expected[request_id, 0] = expected_output(prompt, params, info)
        if request_id % 2:
            collect(core, outputs, reasons)
    run_until_idle(core, outputs, reasons)
    assert {key: (outputs[key], reasons[key]) for key in expected} == expected
