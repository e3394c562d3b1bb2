"""A simulation as options: which machine, which engine, which load, how many replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from inflight.config import ConfigError, EngineConfig
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.router import make_router
from inflight_tools.simulator.simulation import Outcome, Simulation
from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Scenario

__all__ = ["Scene"]


@dataclass(frozen=True)
class Scene:
    """Everything that a simulation depends on.

    Attributes:
        values: keys of `model.json`, on top of the profile's.
        users: of a closed loop; 0 takes the scenario's.
    """

    profile: Profile
    values: dict[str, Any]
    load: Load
    users: int = 0
    replicas: int = 1
    router: str = "least-loaded"

    def check(self) -> None:
        """Refuse what cannot be simulated, before anything is.

        Raises:
            ConfigError, WorkloadError: an option that cannot be used, or a pool too small for a request.
        """
        config, source = self.config(), self.load.load()
        next(self.load.jobs(), None)
        make_router(self.router)
        if self.load.requests < 0:
            raise ConfigError("requests=-1 never ends; a simulation needs a number of requests")
        longest = min(source.longest, config.max_model_len or self.profile.max_model_len)
        room = self.profile.blocks(config) * config.block_size
        if room < longest:
            raise ConfigError(
                f"the KV pool holds {room} tokens, and the load has requests of {longest}; raise kv_cache_memory or "
                "num_gpu_blocks_override"
            )

    def config(self) -> EngineConfig:
        """The engine's options."""
        return self.profile.config(self.values)

    def run(self) -> Outcome:
        """Simulate."""
        config, source = self.config(), self.load.load()
        engines = [SimulatedEngine.of(config, self.profile) for _ in range(self.replicas)]
        users = self.users or (source.users if isinstance(source, Scenario) else 1)
        prompts = IdPrompts(self.profile.vocab_size, self.load.seed)
        return Simulation(engines, make_router(self.router), self.load.jobs(), prompts, users).run()

    def with_values(self, values: dict[str, Any]) -> Scene:
        """The same with other engine options."""
        return dataclasses.replace(self, values={**self.values, **values})

    def at_rate(self, rate: float) -> Scene:
        """The same in an open loop of so many requests per second."""
        return dataclasses.replace(self, load=dataclasses.replace(self.load, rate=rate))

    def model_json(self) -> dict[str, Any]:
        """Keys of `model.json` for the engine that is simulated."""
        # What calibration resolved ("auto") is not what the user chose: only what was chosen is written.
        sizes = {key: self.profile.options[key] for key in _CHOSEN if key in self.profile.options}
        return {"model": self.profile.checkpoint, **sizes, **self.values}


_CHOSEN = ("dtype", "block_size", "max_num_seqs", "max_num_batched_tokens", "cpu_threads")
