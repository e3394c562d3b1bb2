"""Replicas that compute only prompts beside as many replicas that do both: which serve a load better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from inflight.config import ConfigError
from inflight_tools.simulator.report import Report, summarise
from inflight_tools.simulator.scene import Scene
from inflight_tools.simulator.sweep import Trial
from inflight_tools.workload.slo import SLO

__all__ = ["compare", "comparison_table", "target_ms"]


def compare(scene: Scene, slo: SLO, tell: Callable[[str], None] = lambda line: None) -> list[Trial]:
    """The load on as many replicas that do both, and on those of `scene`: each without a latency target, and with one.

    Args:
        scene: with replicas that compute only prompts.  Its `itl_target_ms` is the target; otherwise the SLO's longest
            gap is, or else its time per token.
        tell: called with a line per simulation.
    """
    assert scene.prefills is not None
    target = target_ms(scene, slo)
    trials: list[Trial] = []
    for prefills in (0, scene.prefills.replicas):
        for value in (None, target):
            one = scene.with_values({"itl_target_ms": value}) if prefills else scene.all_in_one(value)
            setting = {"replicas": one.replicas, "prefill_replicas": prefills, "itl_target_ms": value}
            trials.append(Trial(setting, summarise(one.run(), slo), scene.load.rate))
            tell(f"{_named(setting)}: {100 * trials[-1].report.attainment:.1f}% good")
    return trials


def target_ms(scene: Scene, slo: SLO) -> float:
    """The `itl_target_ms` of the rows with a target; see `compare`.

    Raises:
        ConfigError: the SLO's limit cannot be one.
    """
    if (given := scene.config().itl_target_ms) is not None:
        return given
    option, seconds = ("--slo-itl", slo.itl) if slo.itl < math.inf else ("--slo-tpot", slo.tpot)
    if not 0 < seconds <= 1e6:
        raise ConfigError(
            f"{option} {seconds:g}: with --prefill-replicas it is also the engines' itl_target_ms, so more than 0 and "
            "at most 1e6 seconds; or give --set itl_target_ms=MILLISECONDS"
        )
    return 1000 * seconds


def _named(setting: dict[str, Any]) -> str:
    prefills, target = setting["prefill_replicas"], setting["itl_target_ms"]
    name = f"{prefills} for prompts + {setting['replicas']}" if prefills else f"{setting['replicas']} that do both"
    return name if target is None else f"{name}, target {target:g} ms"


def comparison_table(trials: list[Trial], slo: SLO) -> str:
    """The trials of `compare` as text, and which is best."""
    width = max(len(_named(trial.setting)) for trial in trials)
    lines = [
        f"{'':<{width}} {'TTFT p50':>9} {'p99':>9} {'ITL p99':>9} {'TPOT p50':>9} {'p99':>9}  ms "
        f"{'tokens/s':>9} {'good':>7} {'goodput':>8}"
    ]
    for trial in trials:
        report = trial.report
        times = (report.ttft.p50, report.ttft.p99, report.itl.p99, report.tpot.p50, report.tpot.p99)
        lines.append(
            f"{_named(trial.setting):<{width}} "
            + " ".join(f"{1000 * value:9.1f}" for value in times)
            + f"     {report.tokens_per_second:9.1f} {100 * report.attainment:6.1f}% {report.goodput:8.2f}"
        )
    lines += _handover_lines(trials[-2].report)
    return "\n".join([*lines, _verdict(trials, slo)])


def _handover_lines(report: Report) -> list[str]:
    """Of the replicas that compute only prompts, without a target."""
    found = report.handover
    assert found is not None
    outcomes = ", ".join(f"{count} {name}" for name, count in found.outcomes.items()) or "none"
    return [
        f"handovers (no target)  {outcomes}; then {1000 * found.gap.p50:.1f} ms to the next token (p50), "
        f"{1000 * found.gap.p99:.1f} ms (p99)",
        f"{'':<22} {found.bytes_sent / 2**30:.2f} GiB of KV sent; busiest network {100 * found.busiest_link:.0f}%, "
        f"prompts {100 * found.prefill_busy:.0f}%, the others {100 * found.decode_busy:.0f}% of the time",
    ]


def _verdict(trials: list[Trial], slo: SLO) -> str:
    both = max(trials[:2], key=lambda trial: trial.report.goodput)
    apart = max(trials[2:], key=lambda trial: trial.report.goodput)
    ratio = apart.report.goodput / both.report.goodput if both.report.goodput else math.inf
    limits = f"{slo.ttft:g} s to the first token, {1000 * slo.tpot:g} ms per further one"
    limits += f", no gap above {1000 * slo.itl:g} ms" if slo.itl < math.inf else ""
    if not both.report.goodput and not apart.report.goodput:
        return f"SLO ({limits}): no request is good in any of them"
    return (
        f"SLO ({limits}): {_named(apart.setting)} has {ratio:.2f} times the goodput of {_named(both.setting)}; "
        f"{100 * apart.report.attainment:.1f}% and {100 * both.report.attainment:.1f}% of the requests are good"
    )
