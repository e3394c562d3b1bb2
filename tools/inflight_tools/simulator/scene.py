"""The options of a simulation: machine, engine, load and replicas."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.kv_tier import TierSpec, VirtualStore
from inflight_tools.simulator.outcome import Outcome
from inflight_tools.simulator.peer_link import Link, LinkSpec, PeerOf, Port
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.router import make_router
from inflight_tools.simulator.simulated_tiers import Peer
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Scenario

__all__ = ["Prefills", "Scene"]


_HOST = TierSpec("host", 4 * 2**30, 5e9, 1e-5)

# A tier, and its store if all replicas share it.
_Place = tuple[TierSpec, "VirtualStore | None"]


@dataclass(frozen=True)
class Prefills:
    """Replicas that compute only prompts.

    Attributes:
        link: the network of each replica.
        handover: which prompts, as of the gateway: "auto", a number of tokens, or "off".
    """

    replicas: int
    link: LinkSpec
    handover: str = "auto"

    def check(self, config: EngineConfig) -> None:
        """Reject what cannot be simulated.

        Raises:
            ConfigError: an invalid option, or the gateway is not installed.
        """
        if self.replicas < 1:
            raise ConfigError(f"--prefill-replicas {self.replicas}: must be at least 1; leave it out for none")
        if not re.fullmatch(r"auto|off|\d{1,9}", self.handover, re.ASCII):
            raise ConfigError(f"--handover {self.handover!r}: must be a number of tokens, auto or off")
        if not config.enable_prefix_caching:
            raise ConfigError("--prefill-replicas needs enable_prefix_caching=true: KV that is handed over is cached")
        try:
            import inflight_gateway.handover_policy  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--prefill-replicas needs {error.name}: pip install 'triton-inflight[gateway]'"
            ) from None


@dataclass(frozen=True)
class Scene:
    """Everything that a simulation depends on.

    Attributes:
        values: keys of `model.json` that override the profile's.
        users: of a closed loop; 0 uses the scenario's number.
        scrape_interval: seconds between two looks of the router at the replicas' gauges; 0: they are always current.
        accepted_drafts: chance that a draft is accepted if those before it are; None: there are no drafts.
        kv_tiers: where KV is kept beyond the pool, the fastest first.
        prefills: replicas beside `replicas` that compute only prompts.
    """

    profile: Profile
    values: dict[str, Any]
    load: Load
    users: int = 0
    replicas: int = 1
    router: str = "least-loaded"
    incidents: Incidents = field(default_factory=Incidents)
    scrape_interval: float = 0.0
    accepted_drafts: float | None = None
    kv_tiers: tuple[TierSpec, ...] = ()
    prefills: Prefills | None = None

    def check(self) -> None:
        """Reject what cannot be simulated.

        Raises:
            ConfigError, WorkloadError: an invalid option, or a pool that is too small for a request.
        """
        config, source = self.config(), self.load.load()
        next(self.load.jobs(), None)
        self._check_drafts(config)
        if self.kv_tiers and not config.enable_prefix_caching:
            raise ConfigError("--kv-tier needs enable_prefix_caching=true: what comes from a tier is cached")
        make_router(self.router)
        if self.prefills is not None:
            self.prefills.check(config)
        self.incidents.check(self.replicas, 0 if self.prefills is None else self.prefills.replicas)
        if self.load.requests < 0:
            raise ConfigError("requests=-1 is endless; a simulation needs a number of requests")
        longest = min(source.longest, config.max_model_len or self.profile.max_model_len)
        room = self.profile.blocks(config) * config.block_size
        if room < longest:
            raise ConfigError(
                f"the KV pool holds {room} tokens, but the load has requests of {longest}; raise kv_cache_memory or "
                "num_gpu_blocks_override"
            )

    def _check_drafts(self, config: EngineConfig) -> None:
        speculative = config.speculative_config
        if self.accepted_drafts is None:
            return
        if speculative is None or speculative.model is not None:
            raise ConfigError(
                f"accepted_drafts={self.accepted_drafts:g} needs drafts that are copied: set speculative_config to "
                '{"method": "suffix"}'
            )

    def config(self) -> EngineConfig:
        """The engine's options."""
        return self.profile.config(self.values)

    def run(self) -> Outcome:
        """Run the simulation."""
        config, prefills = self.config(), self.prefills
        places: list[_Place] = [(spec, VirtualStore(spec) if spec.type == "redis" else None) for spec in self.kv_tiers]
        if prefills is not None:
            return self._run_with(prefills, config, places)
        make = partial(self._engine, config, places)
        engines = [make() for _ in range(self.replicas)]
        router, prompts = make_router(self.router), IdPrompts(self.profile.vocab_size, self.load.seed)
        return Simulation(
            engines, router, self.load.jobs(), prompts, self._users, self.incidents, make, self.scrape_interval
        ).run()

    def _run_with(self, prefills: Prefills, config: EngineConfig, places: Sequence[_Place]) -> Outcome:
        from inflight_tools.simulator.handover import HandoverSimulation

        ports = [Port(prefills.link) for _ in range(prefills.replicas)]
        host: list[_Place] = [] if self._has_host else [(_HOST, None)]  # the others read it
        # It generates nothing, so there is no stream whose gaps it could keep short.
        prefill_config = msgspec.structs.replace(config, itl_target_ms=None)

        def make() -> SimulatedEngine:
            link = Link()
            return self._engine(config, places, [PeerOf(port, link) for port in ports])

        def make_prefill(port: Port) -> SimulatedEngine:
            engine = self._engine(prefill_config, [*host, *places])
            port.tiers = engine.kv_tiers
            return engine

        return HandoverSimulation(
            [make() for _ in range(self.replicas)],
            make_router(self.router),
            self.load.jobs(),
            IdPrompts(self.profile.vocab_size, self.load.seed),
            self._users,
            self.incidents,
            make,
            self.scrape_interval,
            [partial(make_prefill, port) for port in ports],
            ports,
            prefills.handover,
        ).run()

    @property
    def _users(self) -> int:
        source = self.load.load()
        return self.users or (source.users if isinstance(source, Scenario) else 1)

    def _engine(self, config: EngineConfig, places: Sequence[_Place], peers: Sequence[Peer] = ()) -> SimulatedEngine:
        stores = [store or VirtualStore(spec) for spec, store in places]
        return SimulatedEngine.of(config, self.profile, self.accepted_drafts, stores, peers)

    @property
    def _has_host(self) -> bool:
        return any(spec.type == "host" for spec in self.kv_tiers)

    def all_in_one(self, itl_target_ms: float | None) -> Scene:
        """The same load on as many replicas that do both, with as much memory for KV."""
        prefills = 0 if self.prefills is None else self.prefills.replicas
        tiers = self.kv_tiers if self._has_host else (_HOST, *self.kv_tiers)
        scene = dataclasses.replace(self, replicas=self.replicas + prefills, prefills=None, kv_tiers=tiers)
        return scene.with_values({"itl_target_ms": itl_target_ms})

    def with_values(self, values: dict[str, Any]) -> Scene:
        """The same simulation with other engine options."""
        return dataclasses.replace(self, values={**self.values, **values})

    def at_rate(self, rate: float) -> Scene:
        """The same simulation at another arrival rate, in requests per second."""
        return dataclasses.replace(self, load=dataclasses.replace(self.load, rate=rate))

    def at_load(self, factor: float) -> Scene:
        """The same simulation under a multiple of the load: its rate, the speed of its trace, or its users."""
        load, source, process = self.load, self.load.load(), self.load.process()
        if process == "trace":
            return dataclasses.replace(self, load=dataclasses.replace(load, speed=load.speed * factor))
        if process == "closed":
            return dataclasses.replace(self, users=max(1, round(self._users * factor)))
        rate = load.rate or (source.rate if isinstance(source, Scenario) else 1.0)
        return self.at_rate(rate * factor)

    def in_words(self) -> str:
        """The load and who serves it, in one line."""
        load, process = self.load, self.load.process()
        what = f"trace {Path(load.trace).name} at {load.speed:g} x its speed" if load.trace else load.scenario
        if process == "closed":
            what += f", {self._users} users"
        elif process != "trace":
            what += f", {process}, {self.at_load(1.0).load.rate:g} requests/s"
        tiers = "".join(f", KV tier {spec}" for spec in self.kv_tiers)
        return f"{what}; profile {self.profile.name}, router {self.router}{tiers}"

    def model_json(self) -> dict[str, Any]:
        """Keys of `model.json` for the simulated engine."""
        # Options that calibration resolved from "auto" are not the user's choice and stay out, but for the device: it
        # decides whether steps are launched ahead.
        sizes = {key: self.profile.options[key] for key in _CHOSEN if key in self.profile.options}
        return {"model": self.profile.checkpoint, **sizes, **self.values}


_CHOSEN = ("device", "dtype", "block_size", "max_num_seqs", "max_num_batched_tokens", "cpu_threads")
