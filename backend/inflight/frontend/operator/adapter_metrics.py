"""Metrics of adapters.  No torch.

`vllm:lora_requests_info` is the protocol of the Gateway API Inference Extension: its labels are the adapters of running
and of waiting requests, its value is the time at which they became these, and readers take the newest.  So each change
can make another metric, and none is ever deleted (`metrics.py`): their number is bounded.  So is that of the names in
the labels of the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from inflight.frontend.operator.metric_specs import ADAPTER_METRICS
from inflight.frontend.operator.metrics import CreateMetric
from inflight.frontend.output.request_state import RequestState

__all__ = ["AdapterMetrics"]

_PERIOD_SECONDS = 0.5
# Of `vllm:lora_requests_info`, and the letters of their labels in all: each scrape gets all of them.
_MAX_SETS, _MAX_LETTERS = 4096, 1 << 20
_MAX_NAMES = 1024
_OTHERS = "(others)"  # the label of names beyond that
_MAX_LISTED = 256  # names in a label


class AdapterMetrics:
    """Publishes what open requests use, and counts loads.

    Args:
        create: creates a Triton metric.
        max_loras: adapters that can run at the same time.
        open_streams: the open streams at the moment.
        tells_sets: publish `vllm:lora_requests_info`; one of several instances on a device does.
        clock: Unix time, in seconds.
    """

    def __init__(
        self,
        create: CreateMetric,
        max_loras: int,
        open_streams: Callable[[], Iterable[RequestState]],
        tells_sets: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._create = create
        self._max_loras = max_loras
        self._open_streams = open_streams
        self._tells_sets = tells_sets
        self._clock = clock
        self._info, self._requests, loads, seconds = ADAPTER_METRICS
        assert loads.label is not None
        label, outcomes = loads.label
        self._loads = {outcome: create(loads, {label: outcome}, None) for outcome in outcomes}
        self._seconds = create(seconds, {}, list(seconds.buckets or ()))
        self._sets: dict[tuple[str, str], Any] = {}
        self._letters = 0  # in their labels
        self._set: tuple[str, str] | None = None
        self._gauges: dict[tuple[str, str], Any] = {}
        self._shown: Counter[tuple[str, str]] = Counter()
        self._loaded: deque[tuple[str, float]] = deque(maxlen=1000)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="adapter-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and take this instance's requests out of the gauges."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._show(Counter())

    def loaded(self, outcome: str, seconds: float) -> None:
        """Count a load; any thread can call it."""
        self._loaded.append((outcome, seconds))

    def publish(self) -> None:
        while self._loaded:
            outcome, seconds = self._loaded.popleft()
            self._loads[outcome].increment(1)
            self._seconds.observe(seconds)
        now: Counter[tuple[str, str]] = Counter()
        for stream in self._open_streams():
            adapter = stream.request.adapter
            if adapter is not None:
                now[adapter.ref.name, "waiting" if stream.first_token_time is None else "running"] += 1
        if self._tells_sets:
            self._tell(now)
        self._show(now)

    def _loop(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            self.publish()
        self.publish()

    def _tell(self, now: Counter[tuple[str, str]]) -> None:
        running, waiting = (
            ",".join(sorted(name for name, of in now if of == state)[:_MAX_LISTED]) for state in ("running", "waiting")
        )
        wanted = running, waiting
        # Once there are too many, the nearest of those that exist.
        for found in (wanted, (wanted[0], ""), ("", wanted[1]), ("", "")):
            letters = sum(map(len, found))
            has_room = len(self._sets) < _MAX_SETS and self._letters + letters <= _MAX_LETTERS
            if found in self._sets or has_room or found == ("", ""):
                break
        if found == self._set:
            return
        if found not in self._sets:
            self._sets[found] = self._create(self._info, self._labels(found), None)
            self._letters += letters
        self._sets[found].set(self._clock())
        self._set = found

    def _labels(self, found: tuple[str, str]) -> dict[str, str]:
        running, waiting = found
        return {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": running,
            "waiting_lora_adapters": waiting,
        }

    def _show(self, now: Counter[tuple[str, str]]) -> None:
        """Change the gauges by what has changed here: other instances change them, too."""
        bounded: Counter[tuple[str, str]] = Counter()
        for (name, state), count in now.items():
            known = (name, state) in self._gauges or len(self._gauges) < 2 * _MAX_NAMES
            bounded[name if known else _OTHERS, state] += count
            self._make_gauges(name if known else _OTHERS)
        for key in {*bounded, *self._shown}:
            change = bounded[key] - self._shown[key]
            if change:
                self._gauges[key].increment(change)
        self._shown = bounded

    def _make_gauges(self, name: str) -> None:
        for state in ("running", "waiting"):
            if (name, state) not in self._gauges:
                self._gauges[name, state] = self._create(self._requests, {"adapter": name, "state": state}, None)
