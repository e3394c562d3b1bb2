"""Modules that a start from kept weights leaves out."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from startup_rig import CHAIN, in_codes, start

from inflight.config import EngineConfig
from inflight.device import deferred_torch
from inflight.kernels.cpu import library
from inflight.loading import startup

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture


def test_the_second_start_imports_no_transformers(llama: str, cache: Path, tmp_path: Path) -> None:
    """Neither of plain weights nor of codes; nor does a draft model's."""
    gguf = in_codes("Q4_K", tmp_path / "gguf")
    every = [{"model": path} for path in (llama, gguf, in_codes(CHAIN, tmp_path))]
    every.append({"model": llama, "speculative_config": {"model": gguf, "kv_cache_memory": "1MiB"}})
    options = [{**each, "device": "cpu", "kv_cache_memory": "1MiB"} for each in every]
    program = f"""
import sys
from inflight.config import EngineConfig
from inflight.loading.startup import wait_until_kept
from inflight.runner.pipeline import make_runner
for options in {options!r}:
    runner = make_runner(EngineConfig.from_dict(options))
    assert (runner.draft_runner is None) == ("speculative_config" not in options)
wait_until_kept()
print([name for name in ("transformers", "torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""
    for expected in ("['transformers', 'torch._dynamo', 'torch.distributed.tensor']", "[]"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected, done.stderr


def test_parts_of_torch_are_left_out_until_they_are_used(llama: str, cache: Path) -> None:
    start(llama)
    program = f"""
import sys
from inflight.config import EngineConfig
from inflight.device.deferred_torch import import_torch
import_torch()
import torch
from inflight.engine.assembly import make_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.pipeline import make_runner
config = EngineConfig.from_dict({{"model": {llama!r}, "device": "cpu", "kv_cache_memory": "1MiB"}})
core = make_core(config, make_runner(config), listeners=[])
core.add_request(AddRequest(0, [1, 2, 3], SamplingParams(temperature=1.0, seed=1, max_tokens=3, logprobs=2)))
while core.has_work:
    core.step()
parts = {deferred_torch._PARTS!r}
print({{hasattr(sys.modules[name], "__file__") for name in parts}}, "torch._decomp" in sys.modules)
early = sys.modules["torch.export"], torch.distributions, torch.masked, torch.quantization
import transformers
print({{hasattr(sys.modules[name], "__file__") for name in parts}}, callable(torch.export.export))
print({{getattr(torch, name.partition(".")[2]) is sys.modules[name] for name in parts}})
print(torch.linalg.cholesky(torch.empty(3, 3, device="meta")).shape, callable(early[0].export))
print(early[1].Normal(0.0, 1.0).mean.item(), early[2].masked_tensor.__name__, early[3].QuantStub.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    left_out, *rest = done.stdout.splitlines()
    tried = torch.__version__.partition("+")[0] in deferred_torch._TRIED
    assert left_out == ("{False} False" if tried else "{True} True"), done.stderr
    assert rest == ["{True} True", "{True}", "torch.Size([3, 3]) True", "0.0 masked_tensor QuantStub"]


OTHER_USES = (
    ("import torch", "callable(torch.distributions.Normal)"),
    ("from torch.quantization import QuantStub", "QuantStub is torch.quantization.QuantStub"),
    ("from torch.distributions import *", "Normal is torch.distributions.Normal"),
    ("import torch.masked.maskedtensor.core as core", "core.MaskedTensor is torch.masked.MaskedTensor"),
    ("import torch.quantization.qconfig as qconfig", "qconfig.__spec__.origin == qconfig.__file__"),
    ("import torch._dynamo", "torch._dynamo.eval_frame is __import__('sys').modules['torch._dynamo.eval_frame']"),
    ("from importlib.util import find_spec", "find_spec('torch.masked.absent') is None"),
)


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("from torch.distributions.normal import Normal", "Normal is torch.distributions.Normal"),
        *(pytest.param(*use, marks=pytest.mark.nightly) for use in OTHER_USES),
    ],
)
def test_a_part_is_imported_once_when_it_is_used(statement: str, use: str) -> None:
    program = f"""
from inflight.device.deferred_torch import import_torch
import_torch()
{statement}
import torch
print({use})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_who_uses_a_part_that_another_thread_imports_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys\nhalf, rest = sys.modules['torch'].events\nhalf.set(); rest.wait()\nvalue = 1\n"
    (tmp_path / "half_imported.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    half, rest = threading.Event(), threading.Event()
    monkeypatch.setattr(torch, "events", (half, rest), raising=False)
    first = threading.Thread(target=importlib.import_module, args=("half_imported",))
    first.start()
    half.wait()
    import_module = importlib.import_module

    def asked(name: str) -> object:
        rest.set()
        return import_module(name)

    monkeypatch.setattr(deferred_torch.importlib, "import_module", asked)
    try:
        assert deferred_torch._Placeholder("half_imported").value == 1
    finally:
        rest.set()
        first.join()
        sys.modules.pop("half_imported")


@pytest.mark.parametrize(("build", "found"), [("cpu", False), ("cu130", True)])
def test_bindings_for_cuda_are_imported_for_a_build_with_it_alone(
    build: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And can be imported afterwards."""
    tries = []

    def importing(name: str) -> None:
        tries.append((name, sys.modules.get("cuda.bindings", ...)))

    without = {name: module for name, module in sys.modules.items() if name not in ("torch", "cuda.bindings")}
    monkeypatch.setattr(sys, "modules", without)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(deferred_torch, "version", lambda _: f"{deferred_torch._TRIED[0]}+{build}")
    monkeypatch.setattr(deferred_torch.importlib, "import_module", importing)
    deferred_torch.import_torch()
    assert tries == [("torch", ... if found else None)]
    assert "cuda.bindings" not in sys.modules


def test_torch_of_another_version_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(deferred_torch, "version", lambda _: "2.99.0+cpu")
    monkeypatch.setattr(deferred_torch.importlib, "import_module", imported.append)
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    before = [*sys.meta_path]
    deferred_torch.import_torch()
    assert imported == ["torch"] and sys.meta_path == before


def test_a_fork_server_leaves_transformers_out_if_weights_are_kept(llama: str, cache: Path) -> None:
    options = {"model": llama, "device": "auto", "dtype": "float32"}
    assert not startup.is_kept(EngineConfig.from_dict(options))
    start(llama, dtype="float32")
    assert startup.is_kept(EngineConfig.from_dict(options))
    assert not startup.is_kept(EngineConfig.from_dict({**options, "dtype": "bfloat16"}))
    assert not startup.is_kept(EngineConfig.from_dict({**options, "trust_remote_code": True}))
