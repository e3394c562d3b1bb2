"""The record of a simulation: the requests as their users saw them, and the engines."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.workload.scenarios import Job

__all__ = ["Handovers", "Outcome", "Served"]


@dataclass(slots=True)
class Served:
    """A request; times are virtual seconds.

    Attributes:
        replica: index of the engine that it was last sent to; -1 while none is ready.
        first, last: arrival of its first and of its latest token.
        longest_gap: seconds between two of its tokens.
        resumed: times that its replica ended and it went on elsewhere.
        recomputed: tokens whose KV the lost replicas had, and that were computed again.
        cached: prompt tokens that the prefix cache of its last replica served.
        ended: whether its last token has arrived.
        error: why it was rejected; None if it was not.
    """

    job: Job
    arrival: float
    replica: int = -1
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    longest_gap: float = 0.0
    resumed: int = 0
    recomputed: int = 0
    cached: int = 0
    ended: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to its first token."""
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there is only one."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Handovers:
    """The work of replicas that compute only prompts.

    Attributes:
        outcomes: as the gateway counts them in `inflight_gateway_handovers_total`.
        gaps: seconds from the first token, from a replica for prompts, to the next one, from another replica.
        bytes_sent: of KV, by the replicas for prompts.
        busiest: largest share of the time in which the network of one of them sent.
        prefill_busy, decode_busy: share of the time in which a step ran, on a replica of each kind.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    bytes_sent: int = 0
    busiest: float = 0.0
    prefill_busy: float = 0.0
    decode_busy: float = 0.0


@dataclass
class Outcome:
    """The outcome of a load.

    Attributes:
        requests: in order of arrival.
        gaps: seconds between consecutive tokens of a request, over all requests.
        disturbed: for each gap, whether it overlaps one of the `windows`.
        replicas: the engines in their final state.
        kv_use: per engine, the retired ones first, the share of its blocks in use: (mean over the time of its steps,
            maximum).
        retired: engines that died or were restarted.
        windows: spans (start, end) in which some replica was not ready, or a rollout went on.
        waiting, kv_cache_usage: mean of the gauges of a ready replica until the last arrival: requests that wait, and
            share of the KV blocks in use.
        num_replicas: of the fleet, whether they are ready or not.
        handovers: the work of replicas that compute only prompts; None: there are none.
    """

    requests: list[Served]
    gaps: array[float]
    replicas: list[SimulatedEngine]
    kv_use: list[tuple[float, float]]
    disturbed: bytearray = field(default_factory=bytearray)
    retired: list[SimulatedEngine] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    waiting: float = 0.0
    kv_cache_usage: float = 0.0
    num_replicas: int = 1
    handovers: Handovers | None = None

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        ends = [request.last for request in self.requests if request.tokens]
        return max(ends) - self.requests[0].arrival if ends else 0.0
