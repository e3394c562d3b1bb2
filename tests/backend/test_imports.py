"""Imports run one way: from the wire down to the device (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = Path(__file__).parents[2] / "backend" / "inflight"

# What a module of the backend may import of ours, by the longest matching prefix.  Anything else is a wrong turn.
_DATA = {"grammars.spec", "engine.sampling_params", "engine.messages", "engine.step", "engine.token_logprobs"}
_STATE = {"engine.request", *_DATA}
_POLICIES = {"config", "grammars.base", "engine.policies.base", "engine.kv_pool", *_STATE}
_BELOW_LOADING = {"runner.batch_state", "runner.memory", "runner.swap"}
ALLOWED: dict[str, set[str]] = {
    "vllm_options": set(),
    "config": {"speculative", "vllm_options"},
    "speculative": set(),
    "hub": set(),
    "grammars": {"grammars"},
    "engine.sampling_params": {"grammars.spec"},
    "engine.token_logprobs": set(),
    "engine.messages": {"engine.sampling_params", "engine.token_logprobs"},
    "engine.step": {"engine.sampling_params", "engine.token_logprobs"},
    "engine.request": {"engine.sampling_params"},
    "engine.stop_rules": {"engine.sampling_params"},
    "engine.rope_choice": set(),
    "engine.kv_pool": {"engine.request"},
    "engine.pool_without": {"engine.kv_pool", "engine.request"},
    "engine.drafting": {"engine.drafting", "grammars.base", *_STATE},
    "engine.drafting.copying": {"engine.drafting", "engine.request", "speculative"},
    "engine.policies.base": {"engine.kv_pool", "engine.drafting.base", *_STATE},
    "engine.policies.cost_model": {"engine.step"},
    "engine.policies.order": {"config", "engine.request"},
    "engine.tenant_accounts": {"config"},
    "engine.policies.fair_queue": {"config", "engine.policies.order", "engine.request", "engine.tenant_accounts"},
    "engine.policies.victims": _POLICIES,
    "engine.policies.turns": _POLICIES,
    "engine.policies.grammar_admission": {"engine.drafting", *_POLICIES},
    "engine.policies.drafted": {"engine.drafting", *_POLICIES},
    "engine.policies.admission": _POLICIES,
    "engine.policies.budget": {"engine.policies.cost_model", *_POLICIES},
    "engine.policies.in_time": {"engine.policies.admission", *_POLICIES},
    "engine.shedding": {
        "config",
        "engine.policies.admission",
        "engine.policies.in_time",
        "engine.scheduler",
        *_STATE,
    },
    "engine.policies.selection": {
        "config",
        "engine.drafting",
        "engine.policies",
        "engine.tenant_accounts",
        "grammars.base",
        "speculative",
    },
    "engine.swap": {"engine.kv_pool", "engine.policies.cost_model", *_STATE},
    "engine.holding": {"engine.policies.base", *_STATE},
    "engine.logprobs": _STATE,
    "engine.failed_step": {"engine.kv_pool", *_STATE},
    "engine.scheduler": {
        "engine.drafting.guard",
        "engine.failed_step",
        "engine.holding",
        "engine.kv_pool",
        "engine.logprobs",
        "engine.policies.base",
        "engine.pool_without",
        "engine.swap",
        *_STATE,
    },
    "engine.step_trace": _STATE,
    "engine.heartbeat": {"engine.step"},
    "engine.pulse": {"engine.core", "engine.heartbeat", *_DATA},
    "engine.intake": {"engine.kv_pool", "engine.rope_choice", "grammars.base", *_STATE},
    "engine.queue_caps": {"config", "engine.tenant_accounts", *_STATE},
    "engine.frontends": {"engine.messages"},
    "engine.core": {
        "config",
        "engine.intake",
        "engine.kv_pool",
        "engine.policies.selection",
        "engine.queue_caps",
        "engine.scheduler",
        "engine.shedding",
        "engine.step_trace",
        "engine.swap",
        *_STATE,
    },
    "engine.engine_stats": {"engine.core", *_STATE},
    "worker": {
        "config",
        "engine.messages",
        "engine.engine_stats",
        "engine.frontends",
        "engine.holding",
        "engine.core",
        "loading",
        "runner",
        "engine.heartbeat",
        "engine.pulse",
    },
    "kernels": {"kernels"},
    "kernels.cpu": {"kernels.cpu", "attention.base", "attention.int8"},
    "kernels.cpu.cpu_sampler": {"kernels.cpu", "sampling"},
    "kernels.gpu": {"kernels.gpu", "attention.base"},
    "kernels.gpu.gpu_ops": {"kernels.gpu", "attention.base", "ops.base", "ops.reference"},
    "kernels.gpu.gpu_ops_kernels": {"ops.base"},
    "kernels.gpu.gpu_rotate_and_write": {"kernels.gpu", "attention.base", "ops.base"},
    "kernels.gpu.gpu_math": {"sampling"},
    "kernels.gpu.gpu_bad_words": {"sampling"},
    "kernels.gpu.gpu_penalties": {"sampling"},
    "kernels.gpu.gpu_sampler": {"kernels.gpu.gpu_math", "sampling"},
    "attention": {"attention"},
    "attention.base": {"attention.int8"},
    "attention.selection": {"attention", "config", "kernels"},
    "ops": {"ops", "attention.base"},
    "ops.selection": {"ops", "kernels"},
    "sampling": {"sampling", "kernels", "grammars.base", *_DATA},
    # The runner takes plain data: other ranks will get the same.
    "runner": {"runner", "attention.base", *_DATA},
    "runner.model_runner": {"runner", "attention.base", "sampling", "loading.loader", "config", *_DATA},
    "runner.graphs": {"runner", "attention.base", "loading.memory_plan", "config", *_DATA},
    "runner.device_runner": {"runner", "attention.base", "sampling", "loading.loader", "config", *_DATA},
    "runner.draft_runner": {"loading.checkpoint", "loading.errors", "config", "speculative"},
    "runner.step_inputs": {"kernels.gpu"},
    "runner.step_rows": {"runner", "sampling.rules.ragged", *_DATA},
    "runner.prompt_logprobs": {"runner", "sampling", *_DATA},
    "runner.step_output": {"sampling", *_DATA},
    "runner.row_faults": {"runner", "attention.base", "sampling", *_DATA},
    "runner.warm_up": {"runner", "loading.checkpoint", "config"},
    "runner.pipeline": {"runner", "loading.loader", "config", *_DATA},
    "loading": {
        "loading",
        "attention",
        "ops",
        "kernels.cpu",
        "config",
        "grammars",
        "hub",
        "engine.rope_choice",
        *_BELOW_LOADING,
        *_DATA,
    },
    "frontend": {
        "frontend",
        "config",
        "hub",
        "engine.messages",
        "engine.heartbeat",
        "engine.sampling_params",
        "engine.stop_rules",
        "engine.token_logprobs",
        "grammars.spec",
    },
    "model": {"frontend", "config"},
    "llm": {"config", "engine", "frontend", "runner"},
}
TORCH_FREE = ("config", "vllm_options", "hub", "grammars", "engine", "frontend", "model")


def modules() -> list[str]:
    names = []
    for path in sorted(BACKEND.rglob("*.py")):
        parts = list(path.relative_to(BACKEND).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def rule_for(module: str) -> set[str] | None:
    prefixes = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return ALLOWED[max(prefixes, key=len)] if prefixes else None


def imports_of(module: str) -> set[str]:
    path = BACKEND / Path(*module.split(".")) if module else BACKEND
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
    file = BACKEND / Path(*module.split(".")) / "__init__.py"
    if (file.exists() and not imports_of(module)) or not module:
        return
    rule = rule_for(module)
    assert rule is not None, f"{module} has no place in the layering: add it to ALLOWED"
    for target in imports_of(module):
        fits = any(target == name or target.startswith(name + ".") for name in rule)
        assert fits, f"inflight.{module} imports inflight.{target}, which is not below it"


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
