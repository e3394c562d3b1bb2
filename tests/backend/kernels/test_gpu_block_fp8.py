"""Weights in e4m3 with a scale per block: the kernel, the layer, and checkpoints that keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_checkpoint
from compiled_kernels import compiled
from fp8_checkpoints import compress_blocks, set_quantization
from launches import Launches, to_meta
from offline import run, tokens
from paged_case import relative_error
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from card_rig import card_core, functions_as_kernels
from emulated_card import Card

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.gpu_block_fp8 import GpuBlockFp8
from inflight.kernels.gpu.launch import interpreted
from inflight.loading import loader
from inflight.loading.checkpoint import weights
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization import block_fp8_linear
from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear
from inflight.loading.recognise.projection import Projection

E4M3 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="there is neither a GPU nor an interpreter"),
    pytest.mark.usefixtures("gpu_rounding"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
SWITCH = {"kernel_config": {"block_fp8": True}}
OPS = GpuBlockFp8()


def layer(
    outputs: int, inputs: int, block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> BlockFp8Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = (100 * torch.randn(outputs, inputs, generator=generator)).clamp(-448, 448).to(E4M3)
    scale = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), generator=generator) / 1000
    bias = torch.randn(outputs, generator=generator).to(dtype)
    return BlockFp8Linear(weight, scale, block, bias, dtype, OPS).to(DEVICE)


def rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """As a slice of wider ones, surrounded by NaN."""
    wide = torch.full((count, inputs + 32), torch.nan, dtype=dtype)
    wide[:, 16:-16] = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    return wide.to(DEVICE)[:, 16:-16]


def exact(made: BlockFp8Linear, x: torch.Tensor) -> torch.Tensor:
    assert made.bias is not None
    return F.linear(x.float(), made.dequantised(torch.float32), made.bias.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_exact(dtype: torch.dtype) -> None:
    """Rows that select one input each; scales that are powers of 2."""
    codes = torch.arange(256).to(torch.uint8)
    codes[[127, 255]] = 0  # NaN
    weight = torch.stack([codes, codes.flip(0)]).view(E4M3).to(DEVICE)
    scale = torch.tensor([[0.5, 2.0]], device=DEVICE)
    out = OPS.linear(torch.eye(256, dtype=dtype, device=DEVICE), weight, scale, (128, 128), None)
    factors = scale.repeat_interleave(128, 1)
    assert torch.equal(out.t(), (weight.float() * factors).to(dtype))


@pytest.mark.parametrize("count", [1, 16, 17, 70])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"), [(256, 384, (128, 128)), (72, 144, (128, 128)), (200, 512, (48, 256))], ids=str
)
def test_products_are_those_of_the_dequantised_weight(
    count: int, outputs: int, inputs: int, block: tuple[int, int]
) -> None:
    made = layer(outputs, inputs, block)
    x = rows(count, inputs, torch.bfloat16)
    assert relative_error(made(x), exact(made, x)) < 0.003


def test_products_in_float16() -> None:
    made = layer(96, 256, dtype=torch.float16)
    x = rows(5, 256, torch.float16)
    assert relative_error(made(x), exact(made, x)) < 0.0005


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    made, x = layer(96, 256), rows(40, 256, torch.bfloat16)
    assert torch.equal(made(x[3:12]), made(x[:16])[3:12])
    assert torch.equal(made(x[3:30]), made(x)[3:30])


def test_large_steps_and_other_dtypes_use_the_dequantised_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the edge cuts, and whole ones."""
    monkeypatch.setattr(block_fp8_linear, "MAX_ROWS", 4)
    for made in (layer(256, 384), layer(72, 144)):
        monkeypatch.setattr(made, "_ops", None)
        x = rows(5, made.in_features, torch.bfloat16)
        assert torch.equal(made(x), F.linear(x, made.dequantised(torch.bfloat16), made.bias))
        wide = x[:2].float()
        assert relative_error(F.linear(wide, made.dequantised(torch.float32)), exact(made, wide) - made.bias) < 1e-6


def test_merged_layers_compute_the_same() -> None:
    parts = [layer(size, 256, seed=size) for size in (128, 256, 72)]
    x = rows(3, 256, torch.bfloat16)
    expected = torch.cat([part(x) for part in parts], dim=-1)
    projection = Projection(parts)
    projection.merge()
    assert projection.block_fp8 is not None
    assert torch.equal(projection(x), expected)
    assert parts[1].weight.untyped_storage().data_ptr() == projection.block_fp8.weight.untyped_storage().data_ptr()
    assert not projection.takes_quantized
    uneven = Projection([layer(72, 256, seed=72), layer(128, 256, seed=128)])
    uneven.merge()
    assert uneven.block_fp8 is None, "a block would span two layers"
    assert torch.equal(uneven(x), torch.cat([expected[:, 384:], expected[:, :128]], dim=-1))
    with pytest.raises(ValueError, match="multiples of 128"):
        BlockFp8Linear.merged(uneven.linears)


def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = layer(256, 256), Launches(monkeypatch)
    x, weight, scale = (to_meta(x) for x in (rows(3, 256, torch.bfloat16), made.weight, made.weight_scale))
    with launches:
        OPS.linear(x, weight, scale, (128, 128), None)
    assert launches.names == ["block_fp8_kernel"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=256, num_hidden_layers=1)


@pytest.fixture
def small_card(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of torch in place of the other kernels."""
    functions_as_kernels(monkeypatch)
    monkeypatch.setattr(loader, "_CHECKED_TOKENS", 8)


def loaded(path: str, **options: Any) -> Any:
    values = dict(model=path, device="cuda", dtype="bfloat16", num_gpu_blocks_override=64, max_model_len=64)
    return load(EngineConfig.from_dict({**values, **options}))


def layers_of(model: Any) -> dict[str, BlockFp8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, BlockFp8Linear)}


def test_a_checkpoint_keeps_its_blocks(path: str, small_card: None) -> None:
    actual = compress_blocks(path)
    model = loaded(path, **SWITCH)
    layers = layers_of(model.model)
    assert {f"{name}.weight" for name in layers} == set(actual)
    for name, made in layers.items():
        assert made.weight.dtype == E4M3
        assert torch.equal(made.dequantised(torch.float32).cpu(), actual[f"{name}.weight"])
    plain = loaded(path)
    assert not layers_of(plain.model)
    assert model.sizing.check.error(model.model) < 2 * plain.sizing.check.error(plain.model) + 1e-3


def test_the_engine_gives_the_tokens_of_dequantised_weights(path: str, small_card: None) -> None:
    """The whole decoder is fused, on merged projections; prompts of more rows than the kernel takes."""
    compress_blocks(path)
    limits = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, block_size=4, check_on_load=False)
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 2
    found = []
    for options in ({}, SWITCH):
        core = card_core(path, dtype="bfloat16", enforce_eager=True, **limits, **options)
        found.append({key: tokens(deltas) for key, deltas in run(core, [[7, 3, 9] * 6, [8]], params).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "size"),
    [({"dtype": "float32", **SWITCH}, 128), ({**SWITCH}, 64), ({}, 128)],
    ids=["float32", "blocks of 64", "switch is off"],
)
def test_what_does_not_fit_is_dequantised_as_before(
    options: dict[str, Any], size: int, path: str, card: Card, small_card: None
) -> None:
    """To 16 bits, on a card without products in fp8."""
    card.capability = (8, 0)
    actual = compress_blocks(path, size)
    model = loaded(path, **options).model
    assert not layers_of(model)
    name = "model.layers.0.mlp.down_proj"
    weight = model.get_submodule(name).weight
    assert torch.equal(weight.cpu(), actual[f"{name}.weight"].to(weight.dtype))


def test_a_wrong_kernel_is_found(path: str, small_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compress_blocks(path)
    right = GpuBlockFp8.linear
    monkeypatch.setattr(GpuBlockFp8, "linear", lambda self, *args: 1.1 * right(self, *args))
    with pytest.raises(LoadError, match=r"block_fp8 does not work here: the product of .* differs by 10\.\d%"):
        loaded(path, **SWITCH)


def test_numbers_that_are_none_are_refused(path: str, small_card: None) -> None:
    compress_blocks(path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_proj.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"k_proj\.weight has numbers that are not a number"):
        loaded(path, **SWITCH)


@pytest.mark.nightly
def test_memory_is_checked_for_eight_bits(
    path: str, card: Card, small_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card without products in fp8, which has 16 bits of plain ones."""
    card.capability = (8, 0)
    actual = compress_blocks(path)
    in_fp8 = sum(weight.numel() for weight in actual.values())
    numel = sum(tensor.numel() for tensor in load_file(Path(path) / "model.safetensors").values())
    monkeypatch.setattr(weights, "available_memory", lambda device: 2 * numel - in_fp8)
    assert layers_of(loaded(path, check_on_load=False, **SWITCH).model)
    with pytest.raises(LoadError, match="more than the"):
        loaded(path)


def test_weights_alone_in_blocks_stay(path: str, small_card: None) -> None:
    """A scheme of compressed-tensors without quantized inputs: those of the kernel are not."""
    compress_blocks(path)
    scheme = dict(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128])
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    set_quantization(path, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})
    assert layers_of(loaded(path, check_on_load=False, **SWITCH).model)


SCRIPT = """
import json, sys
import torch
from gpu_target import target
from inflight.kernels.gpu.gpu_block_fp8 import GpuBlockFp8

arch, dtype, outputs, inputs = json.loads(sys.argv[1])
weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
scale = torch.empty(outputs // 128, inputs // 128)
like = torch.empty(0, dtype=getattr(torch, dtype))
with target(arch) as compiled:
    GpuBlockFp8().prepare(weight, scale, (128, 128), None, like)
    at_load = len(compiled)
    for rows in (1, 2, 16, 17, 256):
        GpuBlockFp8().linear(like.new_empty(rows, inputs), weight, scale, (128, 128), None)
print(json.dumps([at_load, [kernel.report(arch) for kernel in compiled]]))
"""
SOURCES = ["backend/inflight/kernels/gpu", "backend/inflight/ops/block_fp8.py", "tests/support/gpu_target.py"]
PRODUCT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize(
    ("arch", "dtype", "size"),
    [
        (90, "bfloat16", [28672, 4096]),
        *((arch, "bfloat16", size) for arch in (80, 100, 120) for size in ([28672, 4096], [4096, 14336])),
        (90, "float16", [1536, 7168]),
    ],
)
def test_everything_is_compiled_at_load(
    tmp_path: Path, cache: pytest.Cache, arch: int, dtype: str, size: list[int]
) -> None:
    """Two kernels, whatever the batch; nothing spills, also on cards without products in fp8."""
    at_load, kernels = compiled(cache, tmp_path, "block_fp8", SCRIPT, [arch, dtype, *size], SOURCES)
    assert at_load == len(kernels) == 2
    assert sorted(kernel["block_m"] for kernel in kernels) == [16, 64]
    for kernel in kernels:
        product = "mma.sync" if kernel["block_n"] == 32 else PRODUCT[arch]  # the others need 64 outputs
        assert kernel["instructions"] == ["cp.async.cg", product]
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] == 0, "nothing spills"
