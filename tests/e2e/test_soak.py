"""The shortest form of `make soak`: reloads and unloads while streams run over gRPC and HTTP."""

from __future__ import annotations

from pathlib import Path

from loadtest.soak.run import Plan, soak


def test_mixed_traffic_survives_reloads_and_unloads(triton_installed: None, tmp_path: Path) -> None:
    verdict = soak(Plan(turns=3, kills=False, clients=6, cases=16), tmp_path / "log", lambda line: None)
    report = "\n".join(verdict.lines())
    assert verdict.num_problems == 0, report
    assert verdict.events["reloads"] + verdict.events["unloads and loads"] == 5
    assert {"right to the last token", "cancelled"} <= set(verdict.counts), report
    assert (tmp_path / "log").read_text().count("successfully loaded 'soak'") == 6, "each turn was a real load"
