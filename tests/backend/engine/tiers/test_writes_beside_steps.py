"""KV tiers in the engine: streams that began together do not all have their extents written beside one step."""

from __future__ import annotations

import pytest
from engine_rig import add
from kv_memory import MemoryStore
from tier_conversations import answer, rig_of
from tiers_rig import TieredRig

from inflight.engine.tiers import writer

pytestmark = pytest.mark.usefixtures("half_a_millisecond_a_token")

STREAMS = 8


def queued_by_step(rig: TieredRig) -> list[int]:
    """Extents that each step gave to the tier's thread, until the first stream has ended."""
    tier, counts = rig.tiers.tiers[0], list[int]()
    while not rig.reasons:
        rig.step(99)
        counts.append(len(tier.queued))
    return counts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_extent_of_each_stream_in_a_step_of_its_own(asynchronous):
    """Each of 8 streams completes an extent every 8 tokens, all of them in the same step."""
    rig = rig_of(MemoryStore(), extent_blocks=2, max_num_seqs=STREAMS, async_scheduling=asynchronous)
    prompts = [[number + 1] * 4 for number in range(STREAMS)]
    for number, prompt in enumerate(prompts):
        add(rig.core, 100 + number, prompt, max_tokens=45, ignore_eos=True)
    counts = queued_by_step(rig)[:-1]  # what they leave at their end is sent at once
    assert max(counts) == 1 and sum(counts) >= 4 * STREAMS
    rig.run()
    kept = rig.tiers.tiers[0]._store.extents.keys()
    assert kept == {key for prompt in prompts for key in [*rig.payloads(prompt + answer(prompt, 44))][1::2]}


def test_of_each_stream_an_extent_is_kept_within_eight_steps():
    """As before: if the engine dies, no more is computed again."""
    rig = rig_of(MemoryStore(), extent_blocks=2, max_num_seqs=STREAMS, async_scheduling=False)
    for number in range(STREAMS):
        add(rig.core, number, [number + 1] * 4, max_tokens=45, ignore_eos=True)
    while not rig.reasons:
        rig.step(99)
        num_tokens = 4 + len(rig.outputs.get((0, 0), []))
        complete = STREAMS * ((num_tokens - 1 - writer._EVERY) // 8)
        tier = rig.tiers.tiers[0]
        assert tier.num_stored + len(tier.queued) >= complete
