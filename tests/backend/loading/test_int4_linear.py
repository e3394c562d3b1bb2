"""Weights in four bits on a GPU: their codes, the layer, and which checkpoints and options get it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from card_rig import card, functions_as_kernels
from checkpoints import make_checkpoint
from emulated_card import Card
from int4_layers import int4_twins, int4_weight
from integer_checkpoints import CONFIGS, WRITERS, write
from nightly import nightly_but
from paged_case import relative_error
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from inflight.attention.hf import IMPLEMENTATION
from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import INT4
from inflight.kernels.gpu.gpu_int4 import GpuInt4
from inflight.kernels.registry import select_int4
from inflight.loading import loader
from inflight.loading.checkpoint import weights
from inflight.loading.checkpoint.stored_checkpoint import FORMATS
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization.coded_linear import CodedLinear
from inflight.loading.quantization.cpu_int4 import CpuInt4
from inflight.loading.quantization.int4_linear import Int4Codes, Int4Linear, bytes_of, quantised
from inflight.loading.quantization.packing import Header
from inflight.loading.quantization.stored_weight import Coded
from inflight.loading.recognise.projection import Projection
from inflight.ops.int4 import ReferenceInt4

__all__ = ["card"]

CPU = torch.device("cpu")
FOUR_BITS = [
    *("gptq", "gptq act-order", "awq", "auto-round gptq", "auto-round asymmetric", "auto-round awq"),
    *("pack-quantized group", "pack-quantized asymmetric"),
]
DTYPES = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16"}


def test_bytes() -> None:
    made = quantised(torch.randn(40, 96), None, CPU)
    parts = (made.codes, made.scales, made.offsets, made.factors)
    assert bytes_of(40, 96) == sum(part.nbytes for part in parts if part is not None)


def layer(
    outputs: int, inputs: int = 64, group: int = 32, kind: str = "zeros", seed: int = 0, order: Any = None
) -> Int4Linear:
    weight, _ = int4_weight(outputs, inputs, group, kind, seed=seed)
    return Int4Linear(weight, torch.randn(outputs).bfloat16(), order, torch.bfloat16, ReferenceInt4())


def test_inputs_of_another_dtype_and_in_another_order() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    made, x = layer(24, order=order), torch.randn(2, 3, 64)
    made.bias = None
    plain = torch.empty(24, 64).index_copy_(1, order.long(), made.int4_weight.dequantised(torch.float32))
    assert relative_error(made(x), F.linear(x, plain)) < 1e-6
    out = made(x.bfloat16())
    assert out.dtype == torch.bfloat16 and out.shape == (2, 3, 24)
    assert relative_error(out, F.linear(x, plain)) < 0.01


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "mins"])
def test_merged_layers_compute_the_same(kind: str) -> None:
    order = torch.randperm(64).int()
    parts = [layer(size, kind=kind, seed=size, order=order) for size in (24, 40, 16)]
    x = torch.randn(5, 64).bfloat16()
    expected = torch.cat([part(x) for part in parts], -1)
    projection = Projection(parts)
    projection.merge()
    assert projection.int4 is not None and not projection.takes_quantized
    assert torch.equal(projection(x), expected)
    assert torch.equal(torch.cat([part(x) for part in parts], -1), expected), "the parts are views"
    assert parts[1].codes.untyped_storage().data_ptr() == projection.int4.codes.untyped_storage().data_ptr()


def test_layers_in_other_orders_or_groups_stay_single() -> None:
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)).int() for seed in range(2)]
    for parts in (
        [layer(24, order=orders[0]), layer(40, order=orders[1])],
        [layer(24), layer(40, group=64)],
        [layer(24), layer(40, kind="symmetric")],
    ):
        projection, x = Projection(parts), torch.randn(5, 64).bfloat16()
        expected = torch.cat([part(x) for part in parts], -1)
        projection.merge()
        assert projection.int4 is None
        assert torch.equal(projection(x), expected)
        with pytest.raises(ValueError, match="differ in dtype, codes, order"):
            Int4Linear.merged(parts)


def stored(name: str, inputs: int) -> tuple[Coded, torch.Tensor]:
    """A layer of 24 outputs as the format's reader gives it, and its numbers."""
    arrays, actual = WRITERS[name](np.random.default_rng(0).standard_normal((24, inputs)).astype(np.float32))
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in arrays.items()}
    headers = {key: Header(DTYPES[value.dtype], tuple(value.shape)) for key, value in tensors.items()}
    packing = FORMATS[CONFIGS[name]["quant_method"]](CONFIGS[name]).packing("up_proj", headers)
    assert packing is not None
    return packing.weight("up_proj", (24, inputs), tensors), torch.from_numpy(actual)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_codes_of_a_checkpoint_are_kept_without_loss(name: str) -> None:
    weight, actual = stored(name, 64)
    made = Int4Codes(torch.bfloat16, CPU, verify=True).layer(weight, None, "up_proj")
    assert made is not None
    assert made.scales.dtype == torch.float16
    found = made.int4_weight.dequantised(torch.float32)
    if made.order is not None:
        found = torch.empty_like(found).index_copy_(1, made.order.long(), found)
    assert torch.equal(found, actual)
    assert (made.order is not None) == (name == "gptq act-order")
    assert (made.offsets is None) == (name in ("gptq", "auto-round gptq", "auto-round awq", "pack-quantized group"))


@pytest.mark.parametrize(("name", "inputs"), [("gptq_v2 8 bits", 64), ("gptq", 48)])
def test_codes_that_do_not_fit_are_the_callers(name: str, inputs: int) -> None:
    """Of eight bits; three groups of 16, which cannot be cut into blocks."""
    kept = Int4Codes(torch.bfloat16, CPU, verify=False)
    assert kept.layer(stored(name, inputs)[0], None, "up_proj") is None
    assert kept.count == 0


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture
def small_card(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of torch in place of the other kernels."""
    functions_as_kernels(monkeypatch)
    monkeypatch.setattr(loader, "_CHECKED_TOKENS", 8)


def loaded(path: str, **options: Any) -> nn.Module:
    values = dict(model=path, device="cuda", dtype="bfloat16", num_gpu_blocks_override=64, max_model_len=64)
    return load(EngineConfig.from_dict({**values, **options})).model


def layers_of(model: nn.Module) -> dict[str, Int4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Int4Linear)}


@pytest.mark.parametrize("name", nightly_but(["gptq act-order"], ["gptq act-order", "awq"]))
def test_a_card_keeps_the_codes(path: str, small_card: None, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The check at load passes with all of them; the head, which is plain, stays plain."""
    actual = write(path, name)
    with caplog.at_level(logging.INFO):
        found = layers_of(loaded(path))
    assert {f"{layer}.weight" for layer in found} == set(actual)
    assert all(isinstance(made._ops, GpuInt4) for made in found.values())
    assert "7 linear layers of" in caplog.text and "dequantised" not in caplog.text
    for layer, made in found.items():
        weight = made.int4_weight.dequantised(torch.float32).cpu()
        if made.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, made.order.long().cpu(), weight)
        assert torch.equal(weight, actual[f"{layer}.weight"])


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dtype": "float32"}, "gptq"), ({"quantization": "fp8"}, "gptq"), ({}, "pack-quantized channel 8 bits")],
    ids=["float32", "fp8 beside it", "8 bits"],
)
def test_what_is_dequantised_as_before(path: str, small_card: None, options: dict[str, Any], name: str) -> None:
    write(path, name)
    assert not layers_of(loaded(path, check_on_load=False, **options))


def test_int4_beside_codes_quantizes_what_is_left(
    path: str, small_card: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Unweighted: tokens cannot run through a model that is partly on a card."""
    write(path, "awq", except_for=("mlp.up_proj",))
    found = layers_of(loaded(path, quantization="int4", check_on_load=False))
    assert "errors in all weights count the same: others are on cuda:0" in caplog.text
    assert len(found) == 7
    assert {name for name, made in found.items() if made.factors is not None} == {"model.layers.0.mlp.up_proj"}
    assert len({id(made._ops) for made in found.values()}) == 1, "one scratch for all"


def test_the_option_quantizes_at_load(tmp_path: Path, small_card: None) -> None:
    """Layers with biases; the check at load passes."""
    path = make_checkpoint("qwen2", tmp_path, intermediate_size=64, num_hidden_layers=1)
    plain = load_file(Path(path) / "model.safetensors")
    model = loaded(path, quantization="int4")
    assert len(layers_of(model)) == 7 and type(model.lm_head) is nn.Linear
    for name, made in layers_of(model).items():
        found = made.int4_weight.dequantised(torch.float32).cpu()
        assert relative_error(found, plain[f"{name}.weight"].bfloat16().float()) < 0.08
        assert made.codes.device.type == "cuda"


@pytest.mark.parametrize("model_type", nightly_but(["llama"], ["llama", "qwen3_moe", "phi3"]))
def test_codes_are_those_of_a_cpu(model_type: str, tmp_path: Path, small_card: None) -> None:
    """Every number, to the last bit: errors are weighed by the same mean squares of inputs."""
    torch.set_num_threads(1)
    path = make_checkpoint(model_type, tmp_path, **({} if model_type == "qwen3_moe" else {"intermediate_size": 64}))
    on_card = layers_of(loaded(path, quantization="int4", check_on_load=False))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    plain = {name: model.get_submodule(name).weight.data.clone() for name in on_card}
    CpuInt4().place(model, model.config, CPU, verify=False)
    weighed = 0
    for name, made in on_card.items():
        codes = cast(CodedLinear, model.get_submodule(name)).codes()
        assert torch.equal(made.int4_weight.dequantised(torch.float32).cpu(), codes.dequantize()), name
        weighed += not torch.equal(codes.dequantize(), INT4.encode(plain[name]).dequantize())
    assert weighed > len(on_card) / 2


@pytest.mark.nightly
def test_a_head_in_codes(path: str, small_card: None) -> None:
    """Of 199 outputs, by the fused decoder; the check at load compares the logits."""
    write(path, "gptq", also=("lm_head.weight",))
    model = loaded(path)
    assert isinstance(model.lm_head, Int4Linear)
    assert model.model.layers[0].mlp.gate_proj.codes.untyped_storage().nbytes() == 2 * 64 * 16, "merged with up"


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "opt", "qwen3_moe", "starcoder2", "cohere"]


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_passes_the_check_at_load(model_type: str, tmp_path: Path, small_card: None) -> None:
    """With biases, with layers that do not fit, and beside experts."""
    torch.set_num_threads(1)
    model = loaded(make_checkpoint(model_type, tmp_path), quantization="int4")
    assert layers_of(model)


@pytest.mark.nightly
def test_random_weights_are_quantized_too(path: str, small_card: None) -> None:
    assert len(layers_of(loaded(path, quantization="int4", load_format="dummy", check_on_load=False))) == 7


def wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GpuInt4.linear
    monkeypatch.setattr(GpuInt4, "linear", lambda self, *args: 1.1 * right(self, *args))


def test_a_wrong_kernel_is_found(path: str, small_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_product(monkeypatch)
    with pytest.raises(LoadError, match=r'"int4" does not work here: .* with 1 rows differs by .*%.*; remove it'):
        loaded(path, quantization="int4")


def test_a_checkpoint_is_dequantised_where_the_kernel_is_wrong(
    path: str, small_card: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actual = write(path, "gptq")
    wrong_product(monkeypatch)
    model = loaded(path)
    assert not layers_of(model)
    assert "weights in four bits are dequantised to bfloat16: the product of model.layers.0." in caplog.text
    for name, weight in actual.items():
        assert torch.equal(model.get_parameter(name).cpu(), weight.bfloat16())


def test_numbers_that_are_none_are_refused(path: str, small_card: None) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"k_proj\.weight has infinite or undefined numbers"):
        loaded(path, quantization="int4")


def test_memory_is_checked_for_four_bits(path: str, small_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a checkpoint, and codes that the option makes; each within one percent of what the model takes."""
    stored = sum(
        x.nbytes
        for made in layers_of(loaded(path, quantization="int4", check_on_load=False)).values()
        for x in made.buffers()
    )
    monkeypatch.setattr(weights, "available_memory", lambda device: 0)
    tensors = load_file(Path(path) / "model.safetensors")
    others = sum(2 * x.numel() for name, x in tensors.items() if "proj" not in name)
    assert needed(path, quantization="int4") == pytest.approx(others + stored, rel=0.01)
    write(path, "awq")
    tensors = load_file(Path(path) / "model.safetensors")
    codes = sum(4 * x.numel() for name, x in tensors.items() if name.endswith("qweight"))
    scales = sum(3 * x.numel() for name, x in tensors.items() if name.endswith("scales"))
    assert needed(path) == pytest.approx(others + codes + scales, rel=0.01)
    assert needed(path, dtype="float32") > 2.5 * needed(path)


def needed(path: str, **options: Any) -> float:
    """Bytes, from the message that they do not fit."""
    with pytest.raises(LoadError) as error:
        loaded(path, **options)
    number, unit = str(error.value).split(" take ")[1].split()[:2]
    return float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device": "cpu", "native_forward": False},
            r'quantization="int4" requires native_forward on a CPU; remove one of them',
        ),
        ({"dtype": "float32"}, r"it needs dtype bfloat16 or float16, and the model's is float32; remove it"),
    ],
)
def test_refused_by_name(path: str, card: Card, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(path, quantization="int4", **options)


def test_an_old_card(path: str, card: Card, small_card: None) -> None:
    card.capability = (7, 5)
    with pytest.raises(ConfigError, match=r"compute capability 7\.5 \(supported: 8\.0 and later\); remove it"):
        loaded(path, quantization="int4")
    write(path, "gptq")
    assert not layers_of(loaded(path, check_on_load=False))


def test_a_model_without_layers_that_fit(tmp_path: Path, small_card: None) -> None:
    path = make_checkpoint("llama", tmp_path, hidden_size=48, intermediate_size=48, num_hidden_layers=1)
    with pytest.raises(LoadError, match="no linear layer in its decoder layers whose inputs are a multiple of 32"):
        loaded(path, quantization="int4")


def test_the_twin_runs_on_a_cpu(path: str) -> None:
    with int4_twins():
        model = loaded(path, device="cpu", quantization="int4", native_forward=False)
    assert all(isinstance(made._ops, ReferenceInt4) for made in layers_of(model).values())
    assert isinstance(select_int4(CPU), ReferenceInt4)
