"""The shortest form of `make soak`: engines die, the model is loaded again and unloaded, while streams run over
gRPC and HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.soak.run import Plan, soak


@pytest.mark.nightly
def test_mixed_traffic_survives_kills_reloads_and_unloads(
    triton_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_PERTURB_", "85")  # an access to freed memory crashes at once, as with a deleted metric
    verdict = soak(Plan(turns=1, clients=6, cases=16), tmp_path / "log", lambda line: None)
    report = "\n".join(verdict.lines())
    assert verdict.num_problems == 0, report
    assert verdict.events == {"reloads": 2, "unloads and loads": 1, "kills of the engine": 1}
    assert "right to the last token" in verdict.counts, report
    assert (tmp_path / "log").read_text().count("successfully loaded 'soak'") == 4, "each turn was a real load"
