"""The stub process loads no torch, and OpenTelemetry only to export spans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
names = {{"torch", "transformers", "safetensors", "opentelemetry"}}
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & names)
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith(("inflight.runner", "inflight.engine.core"))]
"""


def test_the_stub_process_loads_no_torch() -> None:
    checkpoint = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
    program = PROGRAM.format(backend=str(ROOT / "backend"), checkpoint=str(checkpoint))
    subprocess.run([sys.executable, "-c", program], check=True)
