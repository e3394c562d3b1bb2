"""Rules of the frontend: no torch in the stub process, one table of the contract, one home per request field."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client import send_buffer as outbox
from inflight.frontend.engine_client import supervisor
from inflight.frontend.engine_client.device_placement import placement
from inflight.frontend.engine_client.supervisor import Supervisor
from inflight.frontend.operator.metric_specs import METRICS
from inflight.frontend.output import output_processor as streams
from inflight.frontend.output.output_processor import Streams
from inflight.frontend.request.contract import INPUTS, OUTPUTS, ParsedRequest, TensorSpec

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, types
stub = types.ModuleType("triton_python_backend_utils")
sys.modules[stub.__name__] = stub
sys.path.insert(0, {backend!r})
import inflight.model
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.frontend.chat.chat_template import ChatTemplate
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


class Extended(AddRequest, array_like=True, tag=1, frozen=True):
    """A request message with a field that nobody but the engine knows."""

    adapter: str = ""


def test_a_new_field_of_the_message_reaches_the_engine_by_itself() -> None:
    engine = Supervisor(EngineConfig(model="m"), lambda level, line: None)
    opened = Streams(demo_tokenizer(), engine, RecordingStats(), print)
    message = Extended(0, [5, 6], SamplingParams(n=2), tenant="t", adapter="poems")
    for _ in range(2):
        opened.open(ParsedRequest(message), RecordingClient())
    frames = [msgspec.msgpack.decode(frame, type=Extended) for frame, _ in engine._outbox._new.values()]
    assert frames == [msgspec.structs.replace(message, request_id=number) for number in (1, 2)]


@pytest.mark.parametrize(
    ("module", "needed"),
    [(supervisor, {"params"}), (outbox, {"request_id", "params"}), (streams, {"request_id", "params"})],
)
def test_who_carries_a_request_names_only_the_fields_it_needs(module: object, needed: set[str]) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert (attributes | keywords) & set(AddRequest.__struct_fields__) == needed


def documented(heading: str) -> list[list[str]]:
    """Rows of the table under a heading of the wire contract, without backticks."""
    text = (ROOT / "docs" / "wire-contract.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(("heading", "specs"), [("Inputs", INPUTS), ("Outputs", OUTPUTS)])
def test_the_page_lists_the_declared_tensors(heading: str, specs: tuple[TensorSpec, ...]) -> None:
    found = [(name, data_type, dims) for name, data_type, dims, *_ in documented(heading)]
    assert found == [(s.name, s.data_type.removeprefix("TYPE_"), str(list(s.dims))) for s in specs]


def test_the_page_names_every_metric() -> None:
    assert [row[0] for row in documented("Metrics")] == [spec.name for spec in METRICS]


def test_no_tensor_is_declared_twice() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)


def test_the_page_names_every_sampling_key() -> None:
    from inflight.frontend.request.sampling_keys import _ALIASES, SAMPLING_KEYS

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
