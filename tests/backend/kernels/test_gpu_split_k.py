"""The split-K product in the interpreter, against torch; compiled for real cards; and in a loaded model."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from compiled_kernels import compiled
from offline import make_core, run, tokens
from torch import Tensor, nn

pytest.importorskip("triton")

from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels import registry
from inflight.kernels.gpu import gpu_split_k
from inflight.kernels.gpu.gpu_split_k import MAX_ROWS, Split, Workspace, split_k_linear, split_of
from inflight.kernels.gpu.launch import interpreted
from inflight.loading.forward.fused_decoder import fuse_modules
from inflight.loading.forward.split_k import split_linears
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.ops.reference_ops import ReferenceOps

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # triton's
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
in_the_interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, split: Split | None = None) -> Tensor:
    """On a fresh workspace; its counters are zero again afterwards."""
    split = split or split_of(*weight.shape, num_sms=4)
    assert split is not None
    workspace = Workspace([(split, len(weight))], DEVICE)
    workspace.sums.fill_(float("nan"))
    out = split_k_linear(x, weight, bias, split, workspace)
    assert not workspace.arrived.any()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "biased"),
    [(1, 64, 1024, False), (16, 32, 1024, True), (5, 50, 1168, True), (3, 1, 2000, False)],
)
def test_products_are_torchs(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = product(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@in_the_interpreter
@pytest.mark.parametrize("order", [(1, 0), (0, 1), (1, 1)], ids=str)
def test_bits_depend_neither_on_the_order_of_programs_nor_on_other_rows(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    x, weight, bias = random(7, 1168), random(50, 1168, seed=1), random(50, seed=2)
    expected = product(x, weight, bias)
    set_index = InterpreterBuilder.set_grid_idx

    def reversed_index(builder: Any, *place: int) -> None:
        flips = zip(place, (*order, 0), builder.grid_dim)
        set_index(builder, *(size - 1 - index if flipped else index for index, flipped, size in flips))

    # Of the class: of the only builder it would stay for good, and hide what other tests put into the class.
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reversed_index)
    assert torch.equal(product(x, weight, bias), expected)
    for row in range(7):
        assert torch.equal(product(x[row : row + 1], weight, bias), expected[row : row + 1])
    x[1:] = float("nan")
    assert torch.equal(product(x, weight, bias)[:1], expected[:1])


@pytest.mark.parametrize("sms", [82, 132, 170])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (1024, 3072), (8192, 28672), (32, 1024)])
def test_parts_fill_the_card_and_cover_the_inputs(outputs: int, inputs: int, sms: int) -> None:
    split = split_of(outputs, inputs, sms)
    assert split is not None and split.parts > 1
    tiles = -(-inputs // 128)
    assert (split.parts - 1) * split.steps < tiles <= split.parts * split.steps, "none is empty"
    assert split.steps >= 4
    assert split.tiles * split.parts >= 3 * sms or split.steps < 8, "or there are too few inputs for more parts"


def test_layers_that_fill_the_card_are_not_split() -> None:
    assert split_of(28672, 4096, 132) is None
    assert split_of(4096, 512, 132) is None, "too few inputs"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Tiles so small that a tiny model has several; returns rows, inputs, outputs and launch_pdl of the products."""
    monkeypatch.setattr(gpu_split_k, "_BLOCK_N", 16)
    monkeypatch.setattr(gpu_split_k, "_BLOCK_K", 16)
    monkeypatch.setattr(gpu_split_k, "_MIN_STEPS", 1)
    seen, kernel = [], gpu_split_k.split_k_linear

    def watched(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append((*x.shape, len(weight), rest[-1]))
        return kernel(x, weight, *rest)

    monkeypatch.setattr(gpu_split_k, "split_k_linear", watched)
    return seen


def config_of(folder: Path, **options: Any) -> EngineConfig:
    path = make_checkpoint("llama", folder, num_hidden_layers=2)
    values = dict(model=path, device="cpu", dtype="float32", kv_cache_memory="1MiB", native_forward=False)
    return EngineConfig.from_dict({**values, **options})


@in_the_interpreter
def test_a_models_layers(small_tiles: list[tuple[int, ...]], tmp_path: Path) -> None:
    model = load(config_of(tmp_path, kernel_config={"split_k": True, "launch_pdl": True})).model
    down = model.model.layers[1].mlp.down_proj
    inputs, outputs = down.in_features, down.out_features
    assert {(rows, inputs, outputs, True) for rows in (1, MAX_ROWS)} <= set(small_tiles), (
        "compared and compiled at load"
    )
    small_tiles.clear()
    for shape, is_split in [((1, 3), True), ((16,), True), ((1, 17), False), ((2, 8), True), ((0,), False)]:
        x = random(*shape, inputs)
        torch.testing.assert_close(down(x), F.linear(x, down.weight), rtol=1e-5, atol=1e-5)
        assert bool(small_tiles) == is_split, shape
        small_tiles.clear()
    with pytest.raises(RuntimeError, match="dtype"):  # torch's, as without the switch
        down(random(3, inputs).double())


@in_the_interpreter
@pytest.mark.nightly  # make test has one of tests/gpu/test_gpu_switches.py
def test_greedy_output_of_an_engine_equals_generate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of more than 16 tokens and decodes of fewer; tiles of the real size."""
    path, rng = make_checkpoint("llama", tmp_path, intermediate_size=2048), Random(0)
    prompts, counts = [rng.choices(range(VOCAB), k=length) for length in (1, 7, 40)], [12, 9, 5]
    options: dict[str, Any] = dict(dtype="float32", native_forward=False, max_num_batched_tokens=24)
    with caplog.at_level(logging.INFO):
        core = make_core(path, device="cpu", kv_cache_memory="8MiB", kernel_config={"split_k": True}, **options)
    assert "split_k computes 2 linear layers, of the sizes [32, 2048]" in caplog.text
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[row, 0]) for row in range(3)] == greedy_reference(path, prompts, counts)


@in_the_interpreter
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_kernel_that_does_not_work_is_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("out of resources: shared memory")
        return F.linear(x, weight) * 1.01

    monkeypatch.setattr(gpu_split_k, "split_k_linear", faulty)
    with caplog.at_level(logging.WARNING):
        model = load(config_of(tmp_path, kernel_config={"split_k": True})).model
    assert all("forward" not in vars(module) for module in model.modules() if isinstance(module, nn.Linear))
    why = (
        "out of resources: shared memory" if fault == "raises" else "the product of 16 rows differs by 1.0% from torch"
    )
    assert any(f"split_k is not used for layers of size [32, 48]: {why}" in line for line in caplog.messages)


@in_the_interpreter
@pytest.mark.usefixtures("small_tiles")
def test_merged_layers_are_left_to_their_product(tmp_path: Path) -> None:
    model = load(config_of(tmp_path)).model
    assert fuse_modules(model, ReferenceOps(), 256) is not None
    split_linears(model)
    split = {name.rpartition(".")[2] for name, module in model.named_modules() if "forward" in vars(module)}
    assert split == {"model", "o_proj", "down_proj"}


@in_the_interpreter
@pytest.mark.usefixtures("small_tiles")
def test_undo_restores_torchs_products(tmp_path: Path) -> None:
    model = load(config_of(tmp_path)).model
    undo = split_linears(model)
    assert undo is not None and "forward" in vars(model.model.layers[0].mlp.down_proj)
    undo()
    assert "forward" not in vars(model.model.layers[0].mlp.down_proj)


def test_a_cpu_refuses_the_switch_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "interpreted", lambda: False)
    with pytest.raises((ConfigError, LoadError), match=r"kernel_config: split_k cannot be used.*a CPU; remove it"):
        load(config_of(tmp_path, kernel_config={"split_k": True}))
    load(config_of(tmp_path, kernel_config={"split_k": False}))


SCRIPT = """
import json, sys
import torch
from gpu_target import SMS, target
from inflight.kernels.gpu.gpu_split_k import Workspace, split_k_linear, split_of

arch, dtype = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
with target(arch) as compiled:
    for outputs, inputs in ((4096, 4096), (4096, 14336)):
        split = split_of(outputs, inputs, SMS[arch])
        workspace = Workspace([(split, outputs)], torch.device("cpu"))
        for rows in (1, 2, 16):
            x, weight = torch.empty(rows, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
            split_k_linear(x, weight, None, split, workspace)
print(json.dumps([dict(kernel.report(arch), ptx_has_atomics="atom" in kernel.ptx) for kernel in compiled]))
"""
SOURCES = [
    "backend/inflight/kernels/gpu/gpu_pdl.py",
    "backend/inflight/kernels/gpu/gpu_split_k.py",
    "tests/support/gpu_target.py",
]


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize(("arch", "dtype"), [(90, "bfloat16"), (80, "float16"), (120, "bfloat16")])
def test_compiled_once_for_all_rows(tmp_path: Path, cache: pytest.Cache, arch: int, dtype: str) -> None:
    kernels: list[dict[str, Any]] = compiled(cache, tmp_path, "split_k", SCRIPT, [arch, dtype], SOURCES)
    assert len(kernels) == 2, "one for each size of layer"
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, "nothing spills"
        assert kernel["instructions"] == ["cp.async.cg", "mma.sync"], "asynchronous loads, tensor cores"
        assert kernel["registers"] * 4 * 128 <= 65536 and kernel["ptx_has_atomics"]
        assert 4 * (kernel["shared_bytes"] + 1024) <= 228 * 1024 or arch != 90, "four programs share an SM"
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
