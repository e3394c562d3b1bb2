"""The engine core as it serves, on a virtual clock: only the device is not there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.policies.cost_model import StepLoad, step_load
from inflight.engine.request import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight_tools.simulator.profile import Profile
from inflight_tools.workload.scenarios import Job

__all__ = ["SimulatedEngine", "SimulatedInfo"]

_TOKEN = 1  # what every step samples; no end-of-sequence token, so lengths are those of the load


class Cost(Protocol):
    """What a step takes."""

    def seconds(self, load: StepLoad) -> float:
        """Of a step with this load."""


@dataclass
class SimulatedInfo:
    """What the core asks of a loaded checkpoint."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    eos_token_ids: list[int] = field(default_factory=list)
    num_host_blocks: int = 0
    swap_seconds_per_block: float = 0.0


class _NoDevice:
    """Samples a token for every row that is due; its time is told by `SimulatedEngine`."""

    def __init__(self, info: SimulatedInfo) -> None:
        self.info = info

    def prepare(self, out: SchedulerOutput) -> None:
        return None

    def execute(self, out: SchedulerOutput, prepared: Any) -> StepOutput:
        return StepOutput([_TOKEN if samples else -1 for samples in out.samples])


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = lambda: result


class _Inline:
    """Stands in for the thread that executes: runs what it is given at once."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> _Done:
        return _Done(call(*arguments))


class SimulatedEngine(EngineCore):
    """`EngineCore` whose steps take the time that a profile says.

    Making a step and taking it in takes the host `host` seconds, running it the device `device`
    seconds.  Without `async_scheduling` the one waits for the other; with it the host makes the next
    step while the device runs one:

        sync    host 1 | device 1 | host 2 | device 2 |
        async   host 1 | device 1 | device 2 | device 3 |
                       | host 2 | | host 3 | |

    Attributes:
        now: virtual seconds; set it forward when the engine was idle.
        busy: seconds in which a step ran.
    """

    def __init__(self, config: EngineConfig, info: SimulatedInfo, device: Cost, host: Cost) -> None:
        super().__init__(config, _NoDevice(info))
        self.now = self.busy = 0.0
        self.steps = 0
        self._costs = device, host
        self._swap_seconds = info.swap_seconds_per_block / 2  # of one way
        self._device_free = self._host_free = 0.0
        self._ends: deque[float] = deque()
        if self._device is not None:
            self._device.shutdown()
            self._device = _Inline()  # type: ignore[assignment]

    @classmethod
    def of(cls, config: EngineConfig, profile: Profile) -> SimulatedEngine:
        """An engine with these options on the machine of `profile`."""
        per_host_block = profile.bytes_per_block * config.block_size
        per_host_block //= profile.options.get("block_size", config.block_size)
        info = SimulatedInfo(
            config.max_model_len or profile.max_model_len,
            profile.vocab_size,
            profile.blocks(config),
            num_host_blocks=config.swap_bytes // per_host_block,
            swap_seconds_per_block=profile.swap_seconds_per_block,
        )
        return cls(config, info, profile.device, profile.host)

    @property
    def load(self) -> int:
        """Sequences that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def send(self, request_id: int, prompt: list[int], job: Job, arrival: float) -> str | None:
        """Add a request; returns why it is refused, if it is."""
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True, seed=0)
        failure = self.add_request(AddRequest(request_id, prompt, params, arrival=arrival))
        return None if failure is None else failure.message

    def step(self) -> StepMessage:
        """One step; `now` is then the time of its tokens.

        Raises:
            RuntimeError: requests wait, and none can run: the simulation would never end.
        """
        message = super().step()
        if message.stats.batch_size:
            self.now = max(self._ends.popleft(), self._host_free if self._in_flight else 0.0)
            self.steps += 1
        elif self.has_work:
            raise RuntimeError(f"{message.stats.waiting} requests wait, and the scheduler lets none of them run")
        return message

    def _clock(self) -> float:
        return self.now

    def _execute(
        self, out: SchedulerOutput, prepared: Any, begun: float | None = None
    ) -> tuple[StepOutput, float, float]:
        if not out.requests:
            return StepOutput([]), self.now, self.now
        device, host = self._costs
        load = step_load(out)
        self._host_free = max(self.now, self._host_free) + host.seconds(load)
        begun = max(self._host_free, self._device_free)
        seconds = device.seconds(load) + self._swap_seconds * (len(out.swap_out) + len(out.swap_in))
        self._device_free = end = begun + seconds
        self._ends.append(end)
        self.busy += seconds
        return self.runner.execute(out, prepared), begun, end
