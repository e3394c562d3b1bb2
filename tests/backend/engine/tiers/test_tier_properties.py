"""Hypothesis drives engines with KV tiers whose stores are slow, hang, lie, tear and repeat: outputs never change."""

from __future__ import annotations

from unittest import mock

from drafters import KINDS, HashDrafter
from engine_rig import VOCAB, Info, add, expected_output
from hypothesis import given
from hypothesis import strategies as st
from tiers_rig import FAULTS, FaultyStore, TieredRig

from inflight.engine.attached import Attached
from inflight.engine.policies import tier_admission
from inflight.engine.tiers import tier

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=50)  # few distinct ids: prefixes collide often
drafters = st.one_of(st.none(), st.builds(HashDrafter, st.sampled_from(KINDS), st.integers(1, 9)))
faults = st.lists(st.sampled_from(("", "", *FAULTS)), max_size=60)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        prompts,
        st.integers(1, 12),  # max_tokens
        st.sampled_from([1, 1, 1, 3]),  # n
        st.one_of(st.none(), st.integers(0, 12)),  # steps until it is aborted
        st.sampled_from(["", "", "b"]),  # tenant
    ),
    min_size=1,
    max_size=8,
)

# Tasks before a step, from which end, and beside the step in flight.
pace = st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 9))


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    need = -(-65 // block_size)
    extent_blocks = draw(st.sampled_from([1, 2, 3]))
    return {
        "block_size": block_size,
        "num_blocks": draw(st.integers(need, need * 3)),
        "extent_blocks": extent_blocks,
        "options": {
            "block_size": block_size,
            "max_num_batched_tokens": draw(st.sampled_from([3, 16, 64, 2048])),
            "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
            "async_scheduling": draw(st.booleans()),
            "admission": draw(st.sampled_from(["free_blocks", "predicted_peak"])),
            "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
            "preemption_mode": "swap",
            "swap_space": "1MiB",
        },
        "num_host_blocks": draw(st.sampled_from([0, 5])),
        "secret": draw(st.sampled_from([b"", b"0123456789abcdef"])),
        "second": draw(st.booleans()),
        "cpu_seconds": draw(st.sampled_from([0.0, 0.0, 5e-5, 1e-3])),
        "stops": draw(st.sampled_from([[], [*range(1, VOCAB, 6)]])),  # as often as that a row is wasted
        "drafter": draw(drafters),
        "engines": draw(st.lists(arrivals, min_size=2, max_size=3)),
        "faults": draw(st.lists(faults, min_size=1, max_size=2)),
        "pace": draw(st.lists(pace, min_size=1, max_size=8)),
        "is_patient": draw(st.booleans()),
        "is_resumed": draw(st.booleans()),  # so that tiers are asked again
    }


@given(workloads())
def test_outputs_are_those_without_tiers(load):
    """Several engines, one after another, over the same stores; each has some of the earlier ones' prompts."""
    stores = [FaultyStore(faults) for faults in load["faults"]]
    again = {"_AGAIN": 1.0, "_UNMEASURED_SECONDS": 2e-3 if load["is_resumed"] else 1e-3}
    with (
        mock.patch.object(tier, "_MOST_ERRORS", 10**9 if load["is_patient"] else 3),
        mock.patch.multiple(tier_admission, **again),
    ):
        said = []
        for arrivals in load["engines"]:
            said = _serve(load, stores, [*arrivals, *said])[:4]


def _serve(load, stores, arrivals):
    """Serve these requests with a new engine, and return follow-ups of them: what clients of a chat send next."""
    info = Info(num_blocks=load["num_blocks"], num_host_blocks=load["num_host_blocks"])
    of_tiers = load["extent_blocks"], stores, load["secret"], load["second"], load["cpu_seconds"]
    rig = TieredRig(info, *of_tiers, **load["options"])
    rig.core.scheduler.policies.drafter = load["drafter"]
    expected, aborts, aborted, sound = {}, {}, set(), {}
    steps = 0

    def step():
        nonlocal steps
        for victim in aborts.pop(steps, ()):
            aborted.add(victim)
            rig.core.abort(victim)
            rig.check()
        rig.step(*load["pace"][steps % len(load["pace"])])
        steps += 1

    follow_ups = []
    for request_id, (gap, prompt, max_tokens, n, abort_after, tenant) in enumerate(arrivals):
        for _ in range(gap):
            step()
        attached = Attached(resumed=load["is_resumed"])
        fields, stops = {"tenant": tenant, "arrival": rig.now, "attached": attached}, load["stops"]
        params = add(rig.core, request_id, prompt, fields, max_tokens=max_tokens, n=n, stop_token_ids=stops)
        answer = expected_output(prompt, params, info)
        expected.update({(request_id, index): answer for index in range(n)})
        sound.update(rig.payloads([*prompt, *answer[0]], tenant))
        if len(prompt) + len(answer[0]) < 60:
            follow_ups.append((gap, [*prompt, *answer[0], 1], max_tokens, 1, None, tenant))
        if abort_after is not None:
            aborts.setdefault(steps + abort_after, []).append(request_id)
    while rig.core.has_work:
        step()
        assert steps < 5000, "a deadlock or livelock"
    for key, answer in expected.items():
        if key[0] in aborted and key not in rig.reasons:
            tokens = rig.outputs.get(key, [])
            assert tokens == answer[0][: len(tokens)]
        else:
            assert (rig.outputs[key], rig.reasons[key]) == answer
    rig.tiers.close()
    for one in stores:
        assert one.given.items() <= sound.items(), "a store was given what no request has computed"
        one.given, one.is_closed = {}, False
    return follow_ups
