"""A checkpoint's codes stay what they are on a CPU: in panels of the native decoder, and in its logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from integer_checkpoints import WRITERS, write
from nightly import nightly_but
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from inflight.attention.hf import IMPLEMENTATION
from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.library import unavailable
from inflight.kernels.cpu.weight_format import INT4, INT6, Codes4, Codes8
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.checkpoint import weights
from inflight.loading.forward.native_decoder import NativeDecoder
from inflight.loading.forward.packed_linear import PackedLinear
from inflight.loading.load_errors import LoadError
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.loader import load
from inflight.loading.quantization.coded_linear import CodedLinear
from inflight.loading.quantization.input_squares import mean_squares

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

KEPT = [name for name in WRITERS if not name.startswith(("nf4", "LLM"))]
_UNEQUAL = ("gptq act-order", "int-quantized tensor")  # each layer has an order, or zero points, of its own
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def loaded(path: object, **options: Any) -> LoadedModel:
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"}
    return load(EngineConfig.from_dict({"model": str(path), **common, **options}))


def numbers(weight: PackedWeight) -> Tensor:
    """Of all parts of a chain."""
    own = weight.codes().dequantize()
    return own if weight.further is None else torch.cat([own, numbers(weight.further)])


def layers_of(model: NativeDecoder) -> dict[str, Tensor]:
    """The packed weights under transformers' names."""
    found = {}
    for i, layer in enumerate(model.tables.layers):
        prefix = f"model.layers.{i}."
        query, key, value = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        merged = {
            (query, key, value): layer.qkv,
            ("self_attn.o_proj",): layer.output,
            ("mlp.gate_proj", "mlp.up_proj"): layer.gate_up,
            ("mlp.down_proj",): layer.down,
        }
        for names, weight in merged.items():
            size = model.attention[i].spec.num_kv_heads * model.attention[i].spec.key_head_size
            whole = numbers(weight)
            sizes = [len(whole) - 2 * size, size, size] if len(names) == 3 else [len(whole) // len(names)] * len(names)
            found |= {f"{prefix}{name}.weight": part for name, part in zip(names, whole.split(sizes))}
    return found | {"lm_head.weight": numbers(model.tables.head)}


def error(model: LoadedModel, expected: LoadedModel) -> float:
    """Relative error of the logits."""
    found, right = (
        torch.cat(paged_logits(each.model, each.backend, list(expected.checked), 16, torch.device("cpu"), ()))
        for each in (model, expected)
    )
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize("name", KEPT)
def test_codes_are_served_as_they_are(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    actual = write(path, name, except_for=("layers.0.mlp.down",))
    with caplog.at_level(logging.INFO):
        model = loaded(path)
    assert "13 linear layers of" in caplog.text
    assert ("a gate and its operand are stored in different codes" in caplog.text) is (name in _UNEQUAL)
    assert isinstance(model.model, NativeDecoder)
    found = layers_of(model.model)
    assert all(torch.equal(found[weight], plain) for weight, plain in actual.items())
    assert error(model, loaded(path, native_forward=False)) < 0.03


@pytest.mark.parametrize(
    "kind",
    nightly_but(
        ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"],
        ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"],
    ),
)
def test_blocks_are_served_as_they_are(tmp_path: Path, kind: str) -> None:
    """Of a model that ties its head, which is then multiplied in the codes of the table."""
    path = make_checkpoint("llama", tmp_path / "plain", **_SIZES)
    file = tmp_path / "model.gguf"
    expected = gguf_files.as_gguf(path, file, kind)
    model = loaded(file)
    assert isinstance(model.model, NativeDecoder)
    found = layers_of(model.model)
    found["lm_head.weight"] = model.model.tables.head.codes().dequantize()
    for name, plain in expected.items():
        if name in found:
            assert np.array_equal(found[name].numpy(), plain.astype(np.float32)), name
    assert torch.equal(found["lm_head.weight"], model.model.tables.embedding)
    assert model.model.tables.head.struct.dtype == 6
    assert error(model, loaded(file, native_forward=False)) < 0.05


def test_layers_that_are_not_recognised_keep_codes_too(tmp_path: Path) -> None:
    """Through transformers' modules, whose linear layers are packed."""
    path = make_checkpoint("gemma2", tmp_path)
    actual = write(path, "awq")
    model = loaded(path)
    layers = {name: layer for name, layer in model.model.named_modules() if isinstance(layer, PackedLinear)}
    for name, plain in actual.items():
        assert torch.equal(layers[name.removesuffix(".weight")].packed.codes().dequantize(), plain)
    assert error(model, loaded(path, native_forward=False)) < 0.03


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantization_beside_them_is_for_what_is_left(tmp_path: Path, quantization: str) -> None:
    path = make_checkpoint("llama", tmp_path, intermediate_size=64)
    actual = write(path, "gptq", except_for=("layers.0.mlp.down",))
    model = loaded(path, quantization=quantization).model
    found = layers_of(model)
    assert all(torch.equal(found[weight], plain) for weight, plain in actual.items())
    assert isinstance(model.tables.head.codes(), Codes8)
    down = model.tables.layers[0].down.codes()
    assert not isinstance(down, Codes4 if quantization == "int8" else Codes8)


def test_int4_is_compared_with_what_its_codes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that four bits explain is not the check's business; one of the kernel is."""
    path = make_checkpoint("llama", tmp_path)
    model = loaded(path, quantization="int4")
    assert isinstance(model.model, NativeDecoder)
    assert isinstance(model.model.tables.layers[0].qkv.codes(), Codes4)
    assert error(model, loaded(path, native_forward=False)) > 0.03
    affine = Codes4.affine

    def wrong(codes: Codes4) -> tuple[Tensor, Tensor, Tensor]:
        zeros, scales, mins = affine(codes)
        return zeros, 1.5 * scales, mins

    monkeypatch.setattr(Codes4, "affine", wrong)
    with pytest.raises(LoadError, match="other logits with weights in int4"):
        loaded(path, quantization="int4")


def test_int4_weighs_errors_by_inputs(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, **_SIZES)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    name = "model.layers.1.mlp.down_proj"
    weight = plain.get_submodule(name).weight.data
    importance = mean_squares(plain, [name], plain.config)[name]
    found = layers_of(loaded(path, quantization="int4").model)[f"{name}.weight"]
    assert torch.equal(found, INT4.encode(weight, importance).dequantize())
    assert not torch.equal(found, INT4.encode(weight).dequantize())


def test_int4_loads_where_inputs_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check, nothing else needs transformers' attention.  Random weights are not measured."""
    path = make_checkpoint("llama", tmp_path, **_SIZES)

    forward = LlamaModel.forward

    def fails(model: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        assert model.config._attn_implementation != "eager", "no such kernel"
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", fails)
    model = loaded(path, quantization="int4", check_on_load=False, load_format="dummy").model
    assert "cannot be measured" not in caplog.text
    model = loaded(path, quantization="int4", check_on_load=False).model
    assert "inputs of 14 of 14 linear layers cannot be measured: AssertionError: no such kernel" in caplog.text
    assert isinstance(model.tables.layers[0].down.codes(), Codes4)


@pytest.mark.parametrize("name", ["gptq", "int-quantized", "gptq_v2 8 bits"])
def test_weights_count_as_they_are_kept(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path, **{**_SIZES, "tie_word_embeddings": False})
    write(path, name)
    need = _needed(path, monkeypatch)
    model = loaded(path).model
    assert 1.0 <= need / _bytes(model) < 1.08  # zero points count, also where there are none


@pytest.mark.parametrize("kind", nightly_but(["Q5_1", "Q6_K"], ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]))
def test_blocks_count_as_they_are_kept(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    gguf_files.as_gguf(make_checkpoint("llama", tmp_path / "plain", **_SIZES), file, kind)
    need = _needed(file, monkeypatch)
    assert 1.0 <= need / _bytes(loaded(file).model) < 1.05


def _needed(path: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the check of free memory asks for."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(weights, "available_memory", lambda device: 0)
        patch.setattr(weights, "format_bytes", lambda count: found.append(count) or str(count))
        with pytest.raises(LoadError, match="more than the"):
            loaded(path)
    return found[0]


def _bytes(model: NativeDecoder) -> int:
    """Of panels and of plain weights."""

    def size(weight: PackedWeight | None) -> int:
        if weight is None:
            return 0
        padding = weight.panels.nbytes * (1 - weight.out_features / (-(-weight.out_features // 32) * 32))
        return int(weight.panels.nbytes - padding) + size(weight.further)

    tables = model.tables
    norms = [norm for layer in tables.layers for norm in (layer.input_norm, layer.post_norm)]
    plain = [tables.embedding, tables.final_norm, *norms]
    linears = [x for layer in tables.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(map(size, [*linears, tables.head])) + sum(tensor.nbytes for tensor in plain)


def test_a_layer_keeps_its_numbers_when_a_forward_pass_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the native one, and the packed layers after it."""
    path = make_checkpoint("llama", tmp_path)
    actual = write(path, "gptq act-order")
    monkeypatch.setattr("inflight.loading.forward.acceleration._passes", lambda candidate, passes: False)
    model = loaded(path).model
    assert isinstance(model, nn.Module) and not any(isinstance(module, CodedLinear) for module in model.modules())
    assert all(torch.equal(model.get_parameter(name), plain) for name, plain in actual.items())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("bits", "largest"), [(4, 0.15), (6, 0.04), (8, 0.015), (16, 0.0)])
def test_the_head_has_the_bits_that_were_asked_for(
    tmp_path: Path, quantization: str, bits: int, largest: float
) -> None:
    path = make_checkpoint("llama", tmp_path, hidden_size=64)
    tables = loaded(path, quantization=quantization, head_bits=bits).model.tables
    plain = loaded(path).model.tables.head.codes().dequantize()
    found = tables.head.codes().dequantize()
    assert largest / 8 <= (found - plain).norm() / plain.norm() <= largest
    in_bytes = {4: 4 + 16 / 32, 6: 6 + 16 / 64, 8: 8, 16: 32}  # of a model in float32
    assert tables.head.panels.nbytes * 8 == in_bytes[bits] * 64 * (-(-len(plain) // 32) * 32)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
def test_head_bits_without_a_scheme_that_has_them_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'head_bits=6 is for quantization="int8" or "int4" on a CPU'):
        loaded(make_checkpoint("llama", tmp_path), head_bits=6, **options)


def test_six_bits_hold_scales_of_every_size() -> None:
    """Those too small for float16 stay in float32."""
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    for factor in (1e-12, 1.0, 1e12):
        codes = INT6.encode(weight * factor)
        off = (codes.dequantize() - weight * factor).abs().max() / factor
        assert off <= 0.51 * weight.abs().max() / 31
