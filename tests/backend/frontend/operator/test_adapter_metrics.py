"""Metrics of adapters: what the Gateway API Inference Extension reads, and bounds on names and sets."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config import EngineConfig
from inflight.frontend.operator import adapter_metrics
from inflight.frontend.operator.adapter_metrics import AdapterMetrics
from inflight.frontend.operator.metric_specs import MetricSpec

INFO, REQUESTS = "vllm:lora_requests_info", "inflight_adapter_requests"


class Metric:
    """As Triton's: what it has is what a scrape shows."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.name, self.labels, self.value, self.observed = name, labels, 0.0, list[float]()

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, amount: float) -> None:
        self.value += amount

    def observe(self, value: float) -> None:
        self.observed.append(value)


class Rig:
    def __init__(self, **options: Any) -> None:
        self.made: list[Metric] = []
        self.open: list[Any] = []
        clock = itertools.count(1_700_000_000)
        self.metrics = AdapterMetrics(self.create, 8, lambda: self.open, clock=lambda: float(next(clock)), **options)

    def create(self, spec: MetricSpec, labels: dict[str, str], buckets: list[float] | None) -> Metric:
        assert not any(made.name == spec.name and made.labels == labels for made in self.made), "made twice"
        self.made.append(Metric(spec.name, labels))
        return self.made[-1]

    def publish(self, *streams: tuple[str | None, bool]) -> None:
        """Open streams: (adapter, whether it has a token)."""
        self.open = [
            SimpleNamespace(
                request=SimpleNamespace(
                    adapter=None if name is None else SimpleNamespace(ref=SimpleNamespace(name=name))
                ),
                first_token_time=1.0 if runs else None,
            )
            for name, runs in streams
        ]
        self.metrics.publish()

    def of(self, name: str) -> list[Metric]:
        return [metric for metric in self.made if metric.name == name]

    def newest(self) -> dict[str, str]:
        """As the Inference Extension's endpoint picker chooses it."""
        return max(self.of(INFO), key=lambda metric: metric.value).labels

    def requests(self) -> dict[tuple[str, str], float]:
        shown = {(m.labels["adapter"], m.labels["state"]): m.value for m in self.of(REQUESTS)}
        return {key: value for key, value in shown.items() if value}


def test_the_newest_set_is_the_present_one() -> None:
    rig = Rig()
    for _ in range(2):
        rig.publish(("sheep", True), ("doll", True), ("doll", False), (None, True), ("bactrian", False))
        assert rig.newest() == {
            "max_lora": "8",
            "running_lora_adapters": "doll,sheep",
            "waiting_lora_adapters": "bactrian,doll",
        }
        rig.publish((None, True))
        assert rig.newest() == {"max_lora": "8", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert len(rig.of(INFO)) == 2


def test_a_set_is_published_when_it_changes() -> None:
    rig = Rig()
    rig.publish(("doll", True))
    value = rig.of(INFO)[0].value
    rig.publish(("doll", True))
    assert rig.of(INFO)[0].value == value


def test_requests_by_adapter_and_state() -> None:
    rig = Rig()
    rig.publish(("doll", True), ("doll", True), ("sheep", False), (None, False))
    assert rig.requests() == {("doll", "running"): 2, ("sheep", "waiting"): 1}
    rig.publish(("sheep", True))
    assert rig.requests() == {("sheep", "running"): 1}
    rig.metrics.stop()
    assert rig.requests() == {}


def test_several_instances_add_up() -> None:
    first = Rig()
    second = Rig(tells_sets=False)
    shared: dict[tuple[str, str], Metric] = {}

    def create(spec: MetricSpec, labels: dict[str, str], buckets: Any) -> Metric:
        return shared.setdefault((spec.name, str(labels)), Metric(spec.name, labels))

    for rig in (first, second):
        rig.metrics._create = create  # type: ignore[assignment]
        rig.publish(("doll", True))
    (running,) = (m for m in shared.values() if m.name == REQUESTS and m.labels["state"] == "running")
    assert running.value == 2
    first.metrics.stop()
    assert running.value == 1
    assert sum(m.name == INFO for m in shared.values()) == 1


def test_thousands_of_names_make_a_bounded_number_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "_MAX_SETS", 50)
    monkeypatch.setattr(adapter_metrics, "_MAX_NAMES", 20)
    rig = Rig()
    for number in range(1_000):
        rig.publish((f"a{number}", True), ("doll", False))
        assert sum(rig.requests().values()) == 2
    assert len(rig.of(INFO)) <= 51 and len(rig.of(REQUESTS)) <= 2 * 21
    assert rig.requests() == {("(others)", "running"): 1, ("doll", "waiting"): 1}
    rig.publish(("a0", True), ("doll", False))
    assert rig.newest()["running_lora_adapters"] == "a0"
    rig.publish(*[(f"a{number}", True) for number in range(10_000)])
    assert max(len(metric.labels["running_lora_adapters"]) for metric in rig.of(INFO)) < 5000


def test_a_scrape_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of names stays in it; beyond the bound the nearest one that exists is told."""
    monkeypatch.setattr(adapter_metrics, "_MAX_LETTERS", 5000)
    rig = Rig()
    for number in range(300):
        rig.publish(*[(f"tenant-{number + k}", True) for k in range(9)])
    assert 2500 < sum(len(metric.labels["running_lora_adapters"]) for metric in rig.of(INFO)) <= 5000
    assert rig.newest()["running_lora_adapters"] == ""
    rig.publish(*[(f"tenant-{k}", True) for k in range(9)])
    assert rig.newest()["running_lora_adapters"].startswith("tenant-0,")


def test_names_are_looked_at_once_for_each_set() -> None:
    """However many there are: a publication holds up the interpreter, and with it the streams of the stub."""
    looks = 0

    class State(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    rig = Rig()
    rig.metrics._tell(Counter({(f"a{number}", State("running")): 1 for number in range(100)}))
    assert looks <= 200


def test_loads() -> None:
    rig = Rig()
    rig.metrics.loaded("loaded", 0.5)
    rig.metrics.loaded("refused", 0.1)
    rig.publish()
    assert {m.labels["outcome"]: m.value for m in rig.of("inflight_adapter_loads_total")} == {"loaded": 1, "refused": 1}
    assert rig.of("inflight_adapter_load_seconds")[0].observed == [0.5, 0.1]


@pytest.mark.parametrize(
    ("device", "options", "count"),
    [
        ("cpu", {}, 32),
        ("cpu", {"max_loras": 3}, 32),
        ("cpu", {"max_loras": 3, "max_cpu_loras": 5}, 5),
        ("cuda", {}, 8),
        ("cuda:1", {"max_loras": 3}, 3),
        ("cuda", {"max_loras": 3, "max_cpu_loras": 2}, 2),
    ],
)
def test_max_lora_is_how_many_can_run(device: str, options: dict[str, int], count: int) -> None:
    assert EngineConfig(model="x", enable_lora=True, **options).num_running_adapters(device) == count  # type: ignore[arg-type]
