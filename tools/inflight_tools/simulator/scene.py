"""The options of a simulation: machine, engine, load and replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.config import ConfigError, EngineConfig
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.kv_tier import TierSpec, VirtualStore
from inflight_tools.simulator.outcome import Outcome
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.router import make_router
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Scenario

__all__ = ["Scene"]


@dataclass(frozen=True)
class Scene:
    """Everything that a simulation depends on.

    Attributes:
        values: keys of `model.json` that override the profile's.
        users: of a closed loop; 0 uses the scenario's number.
        scrape_interval: seconds between two looks of the router at the replicas' gauges; 0: they are always current.
        accepted_drafts: chance that a draft is accepted if those before it are; None: there are no drafts.
        kv_tiers: where KV is kept beyond the pool, the fastest first.
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
        self.incidents.check(self.replicas)
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
        config, source = self.config(), self.load.load()
        shared = [VirtualStore(spec) if spec.type == "redis" else None for spec in self.kv_tiers]

        def make_engine() -> SimulatedEngine:
            stores = [server or VirtualStore(spec) for server, spec in zip(shared, self.kv_tiers)]
            return SimulatedEngine.of(config, self.profile, self.accepted_drafts, stores)

        engines = [make_engine() for _ in range(self.replicas)]
        users = self.users or (source.users if isinstance(source, Scenario) else 1)
        prompts = IdPrompts(self.profile.vocab_size, self.load.seed)
        return Simulation(
            engines,
            make_router(self.router),
            self.load.jobs(),
            prompts,
            users,
            self.incidents,
            make_engine,
            self.scrape_interval,
        ).run()

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
            users = self.users or (source.users if isinstance(source, Scenario) else 1)
            return dataclasses.replace(self, users=max(1, round(users * factor)))
        rate = load.rate or (source.rate if isinstance(source, Scenario) else 1.0)
        return self.at_rate(rate * factor)

    def in_words(self) -> str:
        """The load and who serves it, in one line."""
        load, process = self.load, self.load.process()
        what = f"trace {Path(load.trace).name} at {load.speed:g} x its speed" if load.trace else load.scenario
        if process == "closed":
            source = load.load()
            what += f", {self.users or (source.users if isinstance(source, Scenario) else 1)} users"
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
