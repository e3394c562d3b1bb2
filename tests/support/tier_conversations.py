"""Conversations with an engine that has KV tiers (tiers_rig)."""

from __future__ import annotations

from typing import Any

from engine_rig import Info, add, expected_output
from kv_memory import MemoryStore
from tiers_rig import TieredRig

from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams

PROMPT = [1 + n % 7 for n in range(41)]
OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4}


def rig_of(
    *stores: Any,
    extent_blocks: int = 1,
    num_blocks: int = 256,
    secret: bytes = b"",
    cpu_seconds: float = 0.0,
    **options: Any,
) -> TieredRig:
    info = Info(num_blocks=num_blocks)
    return TieredRig(info, extent_blocks, stores, secret, cpu_seconds=cpu_seconds, **{**OPTIONS, **options})


def serve(rig: TieredRig, request_id: int, prompt: list[int], fields: Any = None, **params: Any) -> list[int]:
    """The output of a request that is served alone, and is right."""
    add(rig.core, request_id, prompt, fields, **{"max_tokens": 8, "ignore_eos": True, **params})
    rig.run()
    output = rig.outputs[request_id, 0]
    assert output == answer(prompt, len(output))
    return output


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, SamplingParams(max_tokens=count, ignore_eos=True), Info())[0]


def stored(prompt: list[int] = PROMPT, fields: Any = None, **options: Any) -> MemoryStore:
    """A store that has a conversation's extents."""
    store = MemoryStore()
    serve(rig_of(store, **options), 0, prompt, fields)
    assert store.extents
    store.asked.clear()
    return store


def from_tiers(rig: TieredRig) -> tier_admission.TierAdmission:
    policy: Any = rig.core.scheduler.policies.admission
    while not isinstance(policy, tier_admission.TierAdmission):
        policy = policy._inner
    return policy


def num_computed(rig: TieredRig) -> int:
    return rig.core.pool.num_prefix_queries - rig.core.pool.num_prefix_hits
