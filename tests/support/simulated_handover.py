"""Simulations with replicas that compute only prompts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec
from simulated import PROFILE

from inflight.engine.integrity import check_core
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.handover import HandoverSimulation
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.kv_tier import TierSpec, VirtualStore
from inflight_tools.simulator.outcome import Outcome
from inflight_tools.simulator.peer_link import Link, LinkSpec, PeerOf, Port
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.router import LeastLoaded
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

MIB = 2**20
LARGE = msgspec.structs.replace(PROFILE, bytes_per_block=MIB // 16)  # an extent is 16 blocks of 16 tokens
HOST = TierSpec("host", 256 * MIB, 5e9, 1e-5)
LINK = LinkSpec(1e9, 1e-4)


def hand_over(
    jobs: Iterable[Job],
    prefills: int = 1,
    decodes: int = 1,
    link: LinkSpec = LINK,
    handover: str = "256",
    incidents: Incidents | None = None,
    host: TierSpec = HOST,
    profile: Profile = LARGE,
    **options: object,
) -> Outcome:
    """Run a load, and check that no engine has lost a block."""
    config = profile.config({"max_model_len": 2048, "num_gpu_blocks_override": 512, **options})
    ports = [Port(link) for _ in range(prefills)]

    def make() -> SimulatedEngine:
        own = Link()
        return SimulatedEngine.of(config, profile, peers=[PeerOf(port, own) for port in ports])

    def make_prefill(port: Port) -> SimulatedEngine:
        engine = SimulatedEngine.of(config, profile, None, [VirtualStore(host)])
        port.tiers = engine.kv_tiers
        return engine

    outcome = HandoverSimulation(
        [make() for _ in range(decodes)],
        LeastLoaded(),
        iter(jobs),
        IdPrompts(100, 1),
        1000,
        incidents,
        make,
        0.0,
        [partial(make_prefill, port) for port in ports],
        ports,
        handover,
    ).run()
    for engine in outcome.replicas:
        check_no_block_is_lost(engine)
    return outcome


def check_no_block_is_lost(engine: SimulatedEngine) -> None:
    """The engine has no requests: each block is free, cached or reserved for a load in flight."""
    while engine.has_work:  # a step of a cancelled request that was launched ahead
        engine.step()
    check_core(engine)
    assert engine.kv_tiers is not None
    assert engine.pool.num_available + len(engine.kv_tiers.tiers.reserved) == engine.pool.num_blocks
