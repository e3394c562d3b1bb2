"""The stage `decode` of bench/gpu.py: its floors, and what it takes from the profiler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_decode
import gpu_gemms
import gpu_model
import gpu_profile
import gpu_rates
import gpu_rows
import pytest
import torch
from torch.autograd import DeviceType

RUN = gpu_rows.Run("cpu", True, 0.0, Path())


def test_time_covered_by_overlapping_spans() -> None:
    assert gpu_profile.covered([(5, 7), (0, 2), (1, 3), (6, 6.5), (10, 11)]) == 3 + 2 + 1


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_the_twelve_dearest_kernels_of_a_step() -> None:
    host = [event("cudaLaunchKernel", 0, 1, DeviceType.CPU), event("cudaGraphLaunch", 1, 2, DeviceType.CPU)]
    gemms = [event("gemm", at, at + 30) for at in (0, 30, 60, 90)]
    rest = [event(f"small {number}", 120 + number, 121 + number) for number in range(20)]
    found = gpu_profile.shares([*host, *gemms, *rest], steps=2)
    assert (found["launches"], found["busy"]) == (1.0, pytest.approx(140e-6 / 2))
    assert len(found["kernels"]) == 12
    assert found["kernels"][0] == dict(name="gemm", launches=2.0, microseconds=60.0, share=120 / 140)
    lines = gpu_rows.kernel_lines({"kernels": found["kernels"]})
    assert len(lines) == 12
    assert lines[0].split() == ["60.0", "us", "86%", "2.0", "x", "gemm"]
    assert gpu_profile.shares(host, steps=2) == {}, "no GPU was seen"
    assert gpu_rows.kernel_lines({}) == []


def test_layers_in_four_bits_take_fewer_bytes_than_the_head() -> None:
    plain, packed = (gpu_model.Work(gpu_model.llama_8b(RUN), 2, size) for size in (None, 4.5 / 8))
    config = plain.config
    in_layers = plain.weights - config.vocab_size * config.hidden_size
    assert plain.decode_bytes(3, 10) - packed.decode_bytes(3, 10) == in_layers * (2 - 4.5 / 8)


def test_the_matrix_products_are_those_of_the_model() -> None:
    """As many weights as the model has in its linear layers; and the product of a layer of each kind is computed."""
    config = gpu_model.llama_8b(RUN)
    work = gpu_model.Work(config, 4)
    in_layers = sum(outputs * inputs for outputs, inputs in gpu_gemms.layer_sizes(config)) * config.num_hidden_layers
    assert in_layers + config.vocab_size * config.hidden_size == work.weights
    multiplied: list[tuple[int, ...]] = []
    mm = torch.mm

    def counted(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        multiplied.append((len(x), weight.numel()))
        return mm(x, weight, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", counted)
        found = gpu_gemms.gemm_seconds(config, torch.float32, torch.device("cpu"), [(3, 3), (9, 1)])
    assert found.keys() == {(3, 3), (9, 1)}
    assert all(spent > 0 for spent in found.values())
    assert sum(size for rows, size in multiplied if rows == 3) == work.weights
    head = config.vocab_size * config.hidden_size
    assert sum(size for rows, size in multiplied if rows == 9) == work.weights - head, (
        "few tokens of a prompt have logits"
    )
    assert (1, head) in multiplied


@pytest.mark.parametrize(("rows", "by_parts"), [(64, False), (256, True)])
def test_large_batches_are_judged_by_their_products_and_their_kv(
    rows: int, by_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = gpu_model.Work(gpu_model.llama_8b(RUN), 2)
    monkeypatch.setattr(gpu_decode, "decode_steps", lambda core, rows, context, steps: [None] * steps)
    monkeypatch.setattr(gpu_decode, "run_steps", lambda core, outs: 1.0)
    monkeypatch.setattr(gpu_rates, "measured", lambda run: {"read": 1e6, "gemm": 1e12})
    core: Any = None
    row = gpu_decode._decode_row(RUN, core, work, rows, context=100, gemms=0.5)
    kv = rows * (100 + 4 + 1) * work.kv_bytes / 1e6  # in the middle of three steps, after four of warm-up
    parts, in_bytes = 0.5 + kv, work.weights * 2 / 1e6 + kv
    assert row["limit"] == pytest.approx(1e3 * (parts if by_parts else in_bytes))
    assert row["ratio"] == pytest.approx(row["over_parts"] if by_parts else row["over_bytes"])
    assert row["over_parts"] == pytest.approx(1 / parts)
    assert row["over_bytes"] == pytest.approx(1 / in_bytes)
