"""Samples the server during a load: CPU time, queues and KV blocks, twice a second."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections import defaultdict
from types import TracebackType
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from inflight_tools.processes import session_members
from loadtest.targets import Target

__all__ = ["Monitor", "gauges"]

_PERIOD_SECONDS = 0.5
_GPU = "nv_gpu_utilization"
_KEYS = {
    "inflight_requests_running": "running",
    "inflight_requests_waiting": "waiting",
    "inflight_kv_blocks_used": "kv_used",
    "inflight_kv_blocks_free": "kv_free",
    "nv_inference_pending_request_count": "pending",
    _GPU: "gpu",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_share",
}


def gauges(text: str, model: str) -> dict[str, float]:
    """Read the gauges of `model` and the mean utilisation of all GPUs from Prometheus text.

    Gauges that the text does not have are left out.

    Raises:
        ValueError: not Prometheus text.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name in _KEYS and (
                sample.name == _GPU or model in (labels.get("model"), labels.get("model_name"))
            ):
                found[_KEYS[sample.name]].append(sample.value)
    return {key: sum(values) / len(values) for key, values in found.items()}


class Monitor:
    """Samples in a thread while the context is open.

    Attributes:
        samples: each has `time` (`time.time()` seconds), the gauges of the model under load, and the number
            of busy cores: `server_cores` (all processes of the server), `client_cores` (the load generator)
            and `cores` (the whole machine).
    """

    def __init__(self, target: Target, client_pid: int) -> None:
        self.samples: list[dict[str, Any]] = []
        self._target, self._client_pid = target, client_pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        before, then = self._cpu_seconds(), time.time()
        while not self._stop.wait(_PERIOD_SECONDS):
            after, now = self._cpu_seconds(), time.time()
            sample: dict[str, Any] = {"time": now, **scrape(self._target)}
            for key, seconds in after.items():
                if key in before and now > then:
                    sample[key] = max(0.0, seconds - before[key]) / (now - then)
            self.samples.append(sample)
            before, then = after, now

    def _cpu_seconds(self) -> dict[str, float]:
        busy = psutil.cpu_times()
        found = {
            "cores": busy.user + busy.system + getattr(busy, "steal", 0.0) + getattr(busy, "softirq", 0.0),
            "client_cores": _of_processes([self._client_pid]),
        }
        if self._target.pid is not None:
            found["server_cores"] = _of_processes(session_members(self._target.pid))
        return found


def _of_processes(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def scrape(target: Target) -> dict[str, float]:
    """The current gauges; empty if the metrics cannot be read."""
    if not target.metrics:
        return {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        with opener.open(urllib.request.Request(target.metrics, headers=headers), timeout=2.0) as response:
            return gauges(response.read().decode(), target.model)
    except (OSError, ValueError):
        return {}
