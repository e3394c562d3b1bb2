"""Rules the frontend keeps: no torch in the stub process, one table of the contract, placement."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.config import EngineConfig
from inflight.frontend.contract import INPUTS, OUTPUTS, TensorSpec
from inflight.frontend.metrics import METRICS
from inflight.frontend.placement import placement

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, types
stub = types.ModuleType("triton_python_backend_utils")
sys.modules[stub.__name__] = stub
sys.path.insert(0, {backend!r})
import inflight.model
from inflight.frontend.text import Tokenizer
from inflight.frontend.chat import ChatTemplate
Tokenizer.load({checkpoint!r}).encode("text")
ChatTemplate.load({checkpoint!r})
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "safetensors"}})
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith(("inflight.runner", "inflight.engine.core"))]
"""


def test_the_stub_process_loads_no_torch() -> None:
    checkpoint = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
    program = PROGRAM.format(backend=str(ROOT / "backend"), checkpoint=str(checkpoint))
    subprocess.run([sys.executable, "-c", program], check=True)


def documented(heading: str) -> list[list[str]]:
    """Rows of the table under a heading of the contract's page, backticks removed."""
    text = (ROOT / "docs" / "wire-contract.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(("heading", "specs"), [("Inputs", INPUTS), ("Outputs", OUTPUTS)])
def test_the_page_mirrors_the_declared_tensors(heading: str, specs: tuple[TensorSpec, ...]) -> None:
    found = [(name, data_type, dims) for name, data_type, dims, *_ in documented(heading)]
    assert found == [(s.name, s.data_type.removeprefix("TYPE_"), f"[{s.dims[0]}]") for s in specs]


def test_the_page_names_every_metric() -> None:
    assert [row[0] for row in documented("Metrics")] == [spec.name for spec in METRICS]


def test_no_tensor_is_declared_twice() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)


def test_the_page_names_every_sampling_key() -> None:
    from inflight.frontend.sampling_keys import _ALIASES, SAMPLING_KEYS

    text = (ROOT / "docs" / "wire-contract.md").read_text(encoding="utf-8")
    known = {*SAMPLING_KEYS, *_ALIASES}
    assert known <= set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize(
    ("kind", "device_id", "visible", "env"),
    [
        ("MODEL", 0, None, {}),
        ("GPU", 1, None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("GPU", 1, "4,GPU-7", {"CUDA_VISIBLE_DEVICES": "GPU-7"}),
        ("GPU", -1, None, {}),
        ("CPU", 0, None, {}),
    ],
)
def test_placement(kind: str, device_id: int, visible: str | None, env: dict[str, str]) -> None:
    config, found = placement(EngineConfig(model="m"), kind, device_id, visible)
    assert found == env
    assert config.device == ("cpu" if kind == "CPU" else "auto")
    assert placement(EngineConfig(model="m", device="cuda"), "CPU", 0, None)[0].device == "cuda"
