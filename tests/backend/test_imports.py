"""Imports run one way: from the wire down to the device (docs/architecture.md, `[tool.importlinter]`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "backend" / "inflight"

TORCH_FREE = ("adapters", "config", "lora_options", "vllm_options", "hub", "grammars", "engine", "frontend", "model")


def modules() -> list[str]:
    names = []
    for path in sorted(BACKEND.rglob("*.py")):
        parts = list(path.relative_to(BACKEND).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_imports_keep_the_contracts_of_pyproject() -> None:
    pytest.importorskip("importlinter", reason="import-linter needs Python 3.11")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"  # it configures logging
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_runs_in_tritons_stub_loads_no_torch():
    names = [n for n in modules() if n != "model" and n.startswith(TORCH_FREE)]
    code = (
        "import importlib, sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('pb_utils')\n"  # only Triton's stub has it
        f"for name in {names!r}: importlib.import_module('inflight.' + name)\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_backend_works_without_the_tools():
    for module in modules():
        path = BACKEND / Path(*module.split(".")) if module else BACKEND
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert "inflight_tools" not in file.read_text(), f"inflight.{module} needs what an operator's desk has"


def test_gateway_and_client_import_neither_the_backend_nor_the_tools():
    code = (
        "import pkgutil, importlib, sys, inflight_client, inflight_gateway\n"
        "for package in (inflight_client, inflight_gateway):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "bad = {'torch', 'transformers', 'inflight', 'inflight_tools'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
