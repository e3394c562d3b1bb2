"""Imports run one way: from the wire down to the device (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "backend" / "inflight"

# What a module may import of ours, by the longest matching prefix.  Anything else is a wrong turn.
_DATA = {"engine.request", "engine.messages", "engine.step"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "engine.request": set(),
    "engine.messages": {"engine.request"},
    "engine.step": {"engine.request", "engine.messages"},
    "engine.kv_pool": {"engine.request"},
    "engine.policy": {"engine.kv_pool", *_DATA},
    "engine.victims": {"config", "engine.policy", "engine.request"},
    "engine.admission": {"config", "engine.kv_pool", "engine.policy", "engine.request"},
    "engine.swap": {"engine.kv_pool", "engine.cost_model", *_DATA},
    "engine.cost_model": {"engine.step"},
    "engine.budget": {"config", "engine.cost_model", "engine.policy", *_DATA},
    "engine.order": {"config", "engine.request"},
    "engine.fair_queue": {"config", "engine.order", "engine.request"},
    "engine.policies": {
        "config",
        "engine.admission",
        "engine.victims",
        "engine.budget",
        "engine.fair_queue",
        "engine.order",
        "engine.policy",
    },
    "engine.scheduler": {"engine.kv_pool", "engine.policy", "engine.swap", *_DATA},
    "engine.step_trace": _DATA,
    "engine.core": {
        "config",
        "engine.kv_pool",
        "engine.policies",
        "engine.scheduler",
        "engine.step_trace",
        "engine.swap",
        *_DATA,
    },
    "engine.process": {"config", "engine.messages", "engine.core", "runner"},
    "attention": {"attention", "config"},
    "triton_launch": set(),
    "ops": {"ops", "attention", "triton_launch"},
    "sampling": {"sampling", "triton_launch", *_DATA},
    "runner": {"runner", "attention", "ops", "sampling", "config", *_DATA},
    "frontend": {"frontend", "config", "engine.messages", "engine.request"},
    "metrics": {"engine.messages", "frontend.streams"},
    "frontend.triton_bridge": {"frontend", "config", "metrics"},
    "model": {"frontend", "metrics", "config"},
    "workload": {"workload"},
    "simulator": {"simulator", "workload", "config", "engine"},
    "simulator.commands": {"simulator", "workload", "config", "repository"},
    "simulator.calibrate": {"simulator", "config", "engine", "runner"},
    "simulator.check": {"simulator", "workload", "config", "engine", "runner"},
    "trace": {"trace", "engine.step_trace"},
    "llm": {"config", "engine", "frontend", "runner"},
}
# Command line and launcher stand outside of the request path.
OUTSIDE = {"", "cli", "demo", "launcher", "installation", "repository"}
TORCH_FREE = ("config", "engine.", "frontend", "metrics", "model", "cli", "launcher", "trace", "workload", "simulator")


def modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def rule_for(module: str) -> set[str] | None:
    prefixes = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return ALLOWED[max(prefixes, key=len)] if prefixes else None


def imports_of(module: str) -> set[str]:
    path = PACKAGE / Path(*module.split(".")) if module else PACKAGE
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "inflight":
            found.add(node.module.removeprefix("inflight").lstrip("."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("inflight.") for a in node.names if a.name.startswith("inflight.")}
    return found


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_stands_below_it(module):
    if module in OUTSIDE or module in ("engine", "runner"):
        return
    rule = rule_for(module)
    assert rule is not None, f"{module} has no place in the layering: add it to ALLOWED"
    for target in imports_of(module):
        fits = any(target == name or target.startswith(name + ".") for name in rule)
        assert fits, f"inflight.{module} imports inflight.{target}, which is not below it"


def test_what_runs_in_tritons_stub_loads_no_torch():
    names = [n for n in modules() if n and n not in ("model", "engine.process") and n.startswith(TORCH_FREE)]
    code = (
        "import importlib, sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('pb_utils')\n"  # only Triton's stub has it
        f"for name in {names!r}: importlib.import_module('inflight.' + name)\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
