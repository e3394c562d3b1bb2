"""Checkpoints whose weights are stored in fp8: the same numbers in fp8 or dequantised, or a refusal by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from fp8_checkpoints import SCHEMES, compress, compressed_tensors, set_quantization
from fp8_twins import fp8_twins
from offline import make_core, run, tokens
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library
from inflight.kernels.gpu.launch import interpreted
from inflight.loading.checkpoint import weights
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization.fp8_linear import Fp8Linear

E4M3 = torch.float8_e4m3fn
PROMPTS = [[7, 3, 9, 100, 5] * 4, [1, 2, 3]]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """As if this CPU had fp8 products: the twin computes them."""
    with fp8_twins():
        yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path, intermediate_size=48, attention_bias=True)


def load_model(path: str, **options: Any) -> nn.Module:
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "native_forward": False}
    return load(EngineConfig.from_dict({"model": path, **common, **options})).model


def rewrite(path: str, change: Any) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu_the_weights_are_dequantised(path: str, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    actual = compress(path, scheme)
    with caplog.at_level(logging.INFO):
        model = load_model(path)
    for name, weight in actual.items():
        assert torch.equal(model.get_parameter(name), weight)
    assert "dequantised to torch.float32: it needs a GPU, and the device is cpu" in caplog.text
    assert "UNEXPECTED" not in caplog.text


@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_fp8_products_they_stay_as_they_are(path: str, scheme: str, on_cpu: None) -> None:
    actual = compress(path, scheme)
    model = load_model(path)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert {f"{name}.weight" for name in layers} == set(actual)
    for name, layer in layers.items():
        weight = layer.weight.float() * layer.weight_scale[:, None]
        expected = actual[f"{name}.weight"]
        if "block" in scheme or scheme == "DeepSeek":  # rounded once more, to one scale per channel
            assert (weight - expected).norm() < 0.04 * expected.norm()
        else:
            assert torch.equal(weight, expected)
        assert layer.bias is None or layer.bias.dtype == torch.float32
    assert type(model.lm_head) is nn.Linear


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"max_num_batched_tokens": 7, "max_num_seqs": 2}], ids=str
)
def test_the_output_is_that_of_the_dequantised_checkpoint(path: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """By the native forward pass, which packs the weights; in int8, they are quantised once more."""
    actual = compress(path, "per channel")
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 2
    deltas = run(make_core(path, **options), PROMPTS, params)
    plain = make_checkpoint("llama", tmp_path / "plain", attention_bias=True)
    rewrite(plain, lambda tensors: tensors.update(actual))
    if "quantization" in options:
        expected = run(make_core(plain, **options), PROMPTS, params)
        assert [tokens(deltas[index, 0]) for index in range(2)] == [tokens(expected[index, 0]) for index in range(2)]
    else:
        assert [tokens(deltas[index, 0]) for index in range(2)] == greedy_reference(plain, PROMPTS, [12] * 2)


def test_the_option_changes_nothing_more(path: str, on_cpu: None) -> None:
    """The layers that the checkpoint leaves in the model's dtype stay there."""
    compress(path, "per tensor, static inputs")
    name = "model.layers.1.mlp.down_proj"

    def in_full(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() * tensors.pop(f"{name}.weight_scale")

    rewrite(path, in_full)
    for options in ({}, {"quantization": "fp8"}):
        model = load_model(path, **options)
        assert type(model.get_submodule(name)) is nn.Linear
        assert isinstance(model.get_submodule("model.layers.1.mlp.up_proj"), Fp8Linear)


def test_weight_only_checkpoints_are_dequantised(path: str, on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    compress(path, "per channel")
    set_quantization(path, compressed_tensors("channel", None, format="naive-quantized"))
    with caplog.at_level(logging.INFO):
        model = load_model(path)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    assert "the checkpoint quantizes weights only" in caplog.text


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here")
def test_its_kv_scales_are_used(path: str, on_cpu: None) -> None:
    pytest.importorskip("triton")
    compress(path, "per channel")
    scheme = dict(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
    set_quantization(path, compressed_tensors("channel", "token", kv_cache_scheme=scheme))
    rewrite(path, lambda tensors: tensors.update({"model.layers.1.self_attn.v_scale": torch.tensor([0.75])}))
    model = load_model(path, attention_backend="gpu", kv_cache_dtype="fp8")
    caches = [layer.self_attn.inflight.cache for layer in model.model.layers]
    assert caches[1].value_scale.tolist() == [0.75, 0.75]
    assert 0.75 not in caches[0].value_scale


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_count_as_they_stay(
    path: str, weights_only: bool, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(path, "per channel")
    if weights_only:
        set_quantization(path, compressed_tensors("channel", None))
    tensors = load_file(Path(path) / "model.safetensors")
    need = sum(tensor.numel() * (1 if tensor.itemsize == 1 and not weights_only else 4) for tensor in tensors.values())
    monkeypatch.setattr(weights, "available_memory", lambda device: need)
    load_model(path)
    monkeypatch.setattr(weights, "available_memory", lambda device: need - 1)
    with pytest.raises(LoadError, match="1 B more than the"):
        load_model(path)


GROUP = compressed_tensors("channel", "token")["config_groups"]["group_0"]


def in_group(part: str, **changes: Any) -> dict[str, Any]:
    return compressed_tensors("channel", "token", config_groups={"group_0": GROUP | {part: GROUP[part] | changes}})


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (compressed_tensors("channel", "token", format="pack-quantized"), "compressed as format='pack-quantized'"),
        (compressed_tensors("channel", "token", format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (
            compressed_tensors("channel", "token", format="marlin-24"),
            "format='marlin-24'.*supported: 'float-quantized'",
        ),
        (in_group("weights", type="int"), "group 'group_0' is compressed as format='float-quantized'"),
        (in_group("weights", num_bits=4), "are float4, channel"),
        (in_group("weights", strategy="group"), "are float8, group.*tensor or channel or block"),
        (in_group("weights", symmetric=False), "asymmetric"),
        (in_group("input_activations", type="int"), "the input_activations of its config group 'group_0' are int8"),
        (compressed_tensors("channel", "token", sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed_tensors("channel", "token", transform_config={"config_groups": {"R1": {}}}), "rotations"),
        (compressed_tensors("channel", "token", config_groups={"W4A16": ["Linear"]}), "'W4A16' is not one of FP8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' "),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"blocks of its weights are \[128, 0\]"),
    ],
)
def test_what_does_not_run_is_refused_by_name(path: str, quantization: dict[str, Any], message: str) -> None:
    set_quantization(path, quantization)
    with pytest.raises(LoadError, match=rf"cannot be loaded: .*{message}.*unquantized checkpoint"):
        load_model(path)


LAYER = "model.layers.1.mlp.down_proj"  # its weight is [32, 48]
WEIGHT, SCALE = f"{LAYER}.weight", f"{LAYER}.weight_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(SCALE), f"{SCALE} is missing"),
        (lambda _: {SCALE: torch.ones(31, 1)}, r"has shape \(31, 1\), and the weight \(32, 48\)"),
        (lambda _: {SCALE: torch.ones(2, 3)}, r"has shape \(2, 3\).*one per block"),
        (lambda _: {SCALE: torch.full((32, 1), torch.nan)}, "undefined number"),
        (lambda _: {SCALE: -torch.ones(32, 1)}, "a negative"),
        (lambda tensors: {WEIGHT: tensors[WEIGHT].float().to(torch.float8_e5m2)}, "stored as F8_E5M2"),
        (lambda _: {"lm_head.weight": torch.ones(199, 32).to(E4M3)}, "lm_head.weight_scale is missing"),
        (lambda _: {"model.norm.weight": torch.ones(32).to(E4M3)}, "which only linear layers can be"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(path: str, change: Any, message: str) -> None:
    compress(path, "per channel")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors)
        tensors.update(changed if isinstance(changed, dict) else {})

    rewrite(path, damage)
    with pytest.raises(LoadError, match=message):
        load_model(path)


def test_plain_weights_that_are_called_fp8_are_refused(path: str) -> None:
    set_quantization(path, {"quant_method": "fp8"})
    with pytest.raises(LoadError, match="none of its linear layers is stored as F8_E4M3"):
        load_model(path)


def test_experts_in_fp8_are_refused_by_name(tmp_path: Path) -> None:
    """transformers 5.17 says first that it has no place for their scales."""
    path = make_checkpoint("qwen3_moe", tmp_path)
    compress(path, "per channel")
    with pytest.raises(LoadError, match=r"layers.0.mlp.experts.*(which only linear layers can be|scales of quant)"):
        load_model(path)


def test_layers_that_the_models_class_ignores_are_left_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as layers that predict further tokens."""
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    compress(path, "per channel")
    rewrite(path, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32).to(E4M3)}))
    load_model(path)
