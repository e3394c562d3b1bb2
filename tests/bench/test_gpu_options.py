"""The stages `options` and `serve` of bench/gpu.py: switches that are not built or fail, and the floor of a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_engine
import gpu_model
import gpu_options
import gpu_rows
import pytest
from gpu_rows import Run

from inflight.config import ConfigError


def run(tmp_path: Path) -> Run:
    return Run("cpu", True, float("inf"), tmp_path / "rows")


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ({"async_scheduling": True}, None),
        ({"async_scheduling": True, "flux_capacitor": 1}, "flux_capacitor"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, None),
        ({"speculative_config": {"method": "ngram", "flux": 2}}, "speculative_config.flux"),
    ],
)
def test_an_option_that_this_version_does_not_have_is_named(values: dict[str, Any], absent: str | None) -> None:
    assert gpu_options.missing(values) == absent


def test_a_switch_is_compared_with_its_own_load_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that is missing, refused or broken has a row that says so, and the next one is measured."""
    seen: list[dict[str, Any]] = []

    @contextmanager
    def engine(run: Run, config: Any, **values: Any) -> Iterator[dict[str, Any]]:
        if values["block_size"] == 1:
            raise ConfigError("block_size 1 is refused")
        if values["block_size"] == 2:
            raise RuntimeError("broken")
        if values["block_size"] == 64:
            logging.getLogger("inflight.loading").warning("its kernel is not used: it is wrong")
        logging.getLogger("inflight.loading").warning("of every engine")
        seen.append(values)
        yield values

    def load(name: str, **switches: dict[str, Any]) -> gpu_options.Load:
        return gpu_options.Load(name, gpu_model.llama_8b, 9, 9, 9, switches, {"block_size": 16})

    small, large, unknown = {"block_size": 8}, {"block_size": 32}, {"no_such_option": 1}
    unused = {"block_size": 64}
    first = load(
        "first", unknown=unknown, refused={"block_size": 1}, broken={"block_size": 2}, unused=unused, small=small
    )
    monkeypatch.setattr(gpu_options, "LOADS", (first, load("second", large=large)))
    monkeypatch.setattr(gpu_options, "engine", engine)
    monkeypatch.setattr(gpu_options, "run_ours", lambda core, work: 30.0 / core["block_size"])
    rows = list(gpu_options.options(run(tmp_path)))
    assert [row.get("status") for row in rows] == [None, "not built", "refused", "failed", "refused", None, None, None]
    assert "no option no_such_option" in rows[1]["why"]
    assert [row["ratio"] for row in rows if "ratio" in row] == [1.0, 0.5, 1.0, 2.0]
    assert rows[4]["why"] == "its kernel is not used: it is wrong"
    assert rows[5]["achieved"] == pytest.approx(3 * (6 + 4) / 30.0 * 8)
    assert [values["async_scheduling"] for values in seen] == [False] * 5, "off is off by name"


def test_no_time_for_an_engine_is_said(tmp_path: Path) -> None:
    found = list(gpu_options.options(Run("cpu", True, 0.0, tmp_path / "rows")))
    assert {row["status"] for row in found} <= {"left out", "not built"}


def test_every_load_has_switches_and_options_that_exist() -> None:
    for load in gpu_options.LOADS:
        assert load.switches
        assert gpu_options.missing(gpu_options._OFF | load.base) is None


def test_the_floor_of_a_load_is_its_products_in_full_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of 64 tokens in and 3 out: a step of 64 tokens takes 5 s, one of 2 rows takes 7 s."""
    asked: list[tuple[int, int]] = []

    def gemm_seconds(config: Any, dtype: Any, device: Any, batches: list[tuple[int, int]]) -> dict[Any, float]:
        asked.extend(batches)
        return {batch: 7.0 if batch[0] == 2 else 5.0 for batch in batches}

    monkeypatch.setattr(gpu_engine, "gemm_seconds", gemm_seconds)
    work = [gpu_engine.Request(0.0, [1] * 64, 3) for _ in range(2)]
    spent = gpu_engine._products_alone(run(tmp_path), SimpleNamespace(), work)
    assert asked == [(2, 2), (64, 1)]
    assert spent == 2 * 5.0 + 3 * 7.0


def test_transformers_on_a_cpu_needs_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "find_spec", lambda name: None)
    why = gpu_engine._peer_missing(run(tmp_path))
    assert why is not None and "psutil" in why
    assert gpu_engine._peer_missing(Run("cuda", False, 0.0, tmp_path / "rows")) is None


@pytest.mark.parametrize("lacks", [{"xxhash"}, {"msgspec", "xxhash"}])
def test_what_images_lack_is_named_before_anything_runs(lacks: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "find_spec", lambda name: None if name in lacks else object())
    with pytest.raises(SystemExit, match=f"--target DIR {' '.join(sorted(lacks))} "):
        gpu_rows.require_packages()
