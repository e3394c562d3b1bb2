"""The engine core as it serves, on a virtual clock: only the device is not there."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from inflight.config import EngineConfig
from inflight.engine.adapter import Adapters
from inflight.engine.assembly import make_parts
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.policies.cost_model import StepLoad, step_load
from inflight.engine.request_choice import RequestChoice
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.tiers.tiers import Tiers
from inflight.grammars.base import Grammars
from inflight_tools.simulator.kv_tier import VirtualStore
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.simulated_tiers import Peer, SimulatedTiers
from inflight_tools.workload.scenarios import Job

__all__ = ["SimulatedEngine", "SimulatedInfo"]

_TOKEN = 1  # what every step samples; no end-of-sequence token, so lengths are those of the load
_LONGEST_HOLD = 120.0  # seconds: no wait for a tier takes as long
_SEED = 1  # decides which drafts are accepted


class Cost(Protocol):
    """The duration of a step."""

    def seconds(self, load: StepLoad) -> float:
        """The duration of a step with this load."""


@dataclass
class SimulatedInfo:
    """The properties of a loaded checkpoint that the core needs."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    eos_token_ids: list[int] = field(default_factory=list)
    num_host_blocks: int = 0
    swap_seconds_per_block: float = 0.0
    choices: list[RequestChoice] = field(default_factory=list)
    grammars: Grammars | None = None
    whole_prompts: bool = False
    tiers: Tiers | None = None
    adapters: Adapters | None = None


class _Ticket(NamedTuple):
    """When a launched step begins and ends, which of its rows sample, and which verify how many drafts."""

    started: float
    ended: float
    samples: list[bool]
    num_drafts: Mapping[int, int]


class SimulatedDevice:
    """A runner whose steps take the time that a profile says, on a clock of its own.

    Making a step and processing its tokens takes the host `host` seconds, running it the device `device` seconds.
    Without `async_scheduling` the one waits for the other; with it the host makes the next step while the
    device runs one:

        sync    host 1 | device 1 | host 2 | device 2 |
        async   host 1 | device 1 | device 2 | device 3 |
                       | host 2 | | host 3 | |

    Args:
        accepted_drafts: chance that a draft is accepted if those before it are.

    Attributes:
        now: virtual seconds.
        busy: seconds in which a step ran.
        steps: steps collected.
        kv_tiers: whose threads take the cores' time from steps; None: there are none.
    """

    draft_runner = None
    num_collected_first = 0

    def __init__(self, info: SimulatedInfo, device: Cost, host: Cost, accepted_drafts: float = 0.0) -> None:
        self.info = info
        self._accepted_drafts, self._random = accepted_drafts, random.Random(_SEED)
        self.now = self.busy = 0.0
        self.steps = 0
        self.kv_tiers: SimulatedTiers | None = None
        self._device, self._host = device, host
        self._swap_seconds = info.swap_seconds_per_block / 2  # of one way
        self._device_free = self._host_free = 0.0

    def launch(self, out: SchedulerOutput) -> _Ticket:
        load = step_load(out)
        self._host_free = max(self.now, self._host_free) + self._host.seconds(load)
        started = max(self._host_free, self._device_free)
        seconds = self._device.seconds(load) + self._swap_seconds * (len(out.swap_out) + len(out.swap_in))
        if self.kv_tiers is not None:
            seconds += self.kv_tiers.cpu_seconds()
        self._device_free = started + seconds
        self.busy += seconds
        num_drafts = {row: len(drafts) for row, drafts in out.draft_token_ids.items()}
        return _Ticket(started, self._device_free, out.samples, num_drafts)

    def collect(self, ticket: _Ticket) -> StepOutput:
        """The time is then that of the step's tokens, or when the host is through with launching the next one."""
        self.now = max(ticket.ended, self._host_free)
        self.steps += 1
        drafted = ticket.num_drafts
        tokens = [_TOKEN if samples and row not in drafted else -1 for row, samples in enumerate(ticket.samples)]
        runs = {row: [_TOKEN] * (1 + self._num_accepted(count)) for row, count in drafted.items()}
        return StepOutput(tokens, runs, started=ticket.started, ended=ticket.ended)

    def _num_accepted(self, num_drafts: int) -> int:
        accepted = 0
        while accepted < num_drafts and self._random.random() < self._accepted_drafts:
            accepted += 1
        return accepted


class SimulatedEngine(EngineCore):
    """`EngineCore` on a `SimulatedDevice` and its clock.

    Every output is the same token over and over, which drafts are copied from; which of them are accepted is a matter
    of chance.

    Args:
        accepted_drafts: chance that a draft is accepted if those before it are; None: there are no drafts.
        stores: where KV is kept beyond the pool, the fastest first.
        bytes_per_block: of KV.
        peers: engines whose host memory is read.
        on_cores: whether steps compute on the cores that the threads of tiers need, too.

    Attributes:
        kv_tiers: None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: SimulatedInfo,
        device: Cost,
        host: Cost,
        accepted_drafts: float | None = None,
        stores: Sequence[VirtualStore] = (),
        bytes_per_block: int = 1,
        peers: Sequence[Peer] = (),
        on_cores: bool = True,
    ) -> None:
        self.device = SimulatedDevice(info, device, host, accepted_drafts or 0.0)
        self.kv_tiers = None
        if stores or peers:
            self.kv_tiers = SimulatedTiers(self.device, stores, bytes_per_block, peers, on_cores)
        self._held_since = math.inf
        self.device.kv_tiers = self.kv_tiers
        info.tiers = None if self.kv_tiers is None else self.kv_tiers.tiers
        if accepted_drafts is None:
            config = msgspec.structs.replace(config, speculative_config=None)
        parts = make_parts(config, self.device, lambda: self.device.now)
        super().__init__(config, self.device, parts, lambda: self.device.now)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        profile: Profile,
        accepted_drafts: float | None = None,
        stores: Sequence[VirtualStore] = (),
        peers: Sequence[Peer] = (),
    ) -> SimulatedEngine:
        """An engine with these options on the machine of `profile`."""
        per_block = profile.bytes_per_block * config.block_size
        per_block //= profile.options.get("block_size", config.block_size)
        info = SimulatedInfo(
            config.max_model_len or profile.max_model_len,
            profile.vocab_size,
            profile.blocks(config),
            num_host_blocks=config.swap_bytes // per_block,
            swap_seconds_per_block=profile.swap_seconds_per_block,
        )
        on_cores = profile.options.get("device", "cpu") == "cpu"
        return cls(config, info, profile.device, profile.host, accepted_drafts, stores, per_block, peers, on_cores)

    def succeed(self, former: SimulatedEngine) -> None:
        """Start in the place of an engine that has ended: it has the disk of that one."""
        if self.kv_tiers is not None and former.kv_tiers is not None:
            self.kv_tiers.succeed(former.kv_tiers)

    def end(self) -> None:
        """It is dead, or was stopped."""
        if self.kv_tiers is not None:
            self.kv_tiers.is_open = False

    def pass_time(self, until: float) -> None:
        """Let the threads of its tiers do what is due by then; while it has nothing to do, no step is longer by it."""
        if self.kv_tiers is not None:
            self.kv_tiers.advance(until)
            if not self.has_work:
                self.kv_tiers.cpu_seconds()

    @property
    def now(self) -> float:
        """Virtual seconds; set it forward when the engine was idle."""
        return self.device.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.device.now = seconds

    @property
    def busy(self) -> float:
        """Virtual seconds in which a step ran."""
        return self.device.busy

    @property
    def steps(self) -> int:
        """Steps collected so far."""
        return self.device.steps

    def send(
        self, request_id: int, prompt: list[int], job: Job, arrival: float, num_outputs: int = 0
    ) -> RequestFailed | None:
        """Add a request that has `num_outputs` tokens already; returns why it is refused, if it is."""
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True, seed=0)
        outputs: list[list[int] | None] = [[_TOKEN] * num_outputs] if num_outputs else []
        attached = Attached(resumed=True) if num_outputs else None
        return self.add_request(
            AddRequest(request_id, prompt, params, arrival=arrival, output_token_ids=outputs, attached=attached)
        )

    def num_computed(self, request_id: int) -> int:
        """Tokens of a request whose KV is in the pool; 0 if it has ended or waits."""
        sequences = self._live.get(request_id)
        return sequences[0].num_computed_tokens if sequences else 0

    def step(self) -> StepMessage:
        """One step; `now` is then the time of its tokens, or of the next look if all requests wait for their KV.

        Raises:
            RuntimeError: requests wait, and none can run: the simulation would never end.
        """
        tiers = self.kv_tiers
        if tiers is not None:
            tiers.advance(self.now)
        message = super().step()
        if message.stats.batch_size or not self.has_work:
            self._held_since = math.inf
            return message
        self._held_since = min(self._held_since, self.now)
        if tiers is None or not self.only_holds or self.now - self._held_since > _LONGEST_HOLD:
            raise RuntimeError(f"{message.stats.waiting} requests wait, and the scheduler lets none of them run")
        self.now = min(max(self.now, tiers.next_end), self.now + HELD_POLL_SECONDS)
        tiers.cpu_seconds()
        return message
