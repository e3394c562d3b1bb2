"""Checkpoints in integers: the numbers that they contain are served, or they are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from fp8_checkpoints import compressed_tensors, set_quantization
from fp8_twins import fp8_twins
from integer_checkpoints import CONFIGS, WRITERS, write
from offline import make_core, run, tokens
from safetensors.torch import load_file, save_file
from torch import nn

import inflight
from inflight import LLM
from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.checkpoint import weights
from inflight.loading.checkpoint.gptq_format import GptqFormat
from inflight.loading.checkpoint.stored_checkpoint import _replace_linears
from inflight.loading.checkpoint.tensor_files import headers_of
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization.fp8_linear import Fp8Linear
from inflight.loading.quantization.stored_linear import StoredLinear

PROMPTS = [[7, 3, 9, 100, 5] * 4, [1, 2, 3]]
LAYER = "model.layers.1.mlp.down_proj"  # 48 inputs, 32 outputs


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path)


def load_model(path: str, **options: Any) -> nn.Module:
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "native_forward": False}
    return load(EngineConfig.from_dict({"model": path, **common, **options})).model


def rewrite(path: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors.update(change(tensors) or {})
    save_file(tensors, file, metadata={"format": "pt"})


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = inflight.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", WRITERS)
def test_the_weights_are_those_of_the_codes(path: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    actual = write(path, name)
    assert len(actual) == 14
    with caplog.at_level(logging.INFO):
        model = load_model(path, dtype="float32")
    for weight, numbers in actual.items():
        assert torch.equal(model.get_parameter(weight), numbers)
    assert "weights of" in caplog.text and "are dequantised to float32" in caplog.text
    assert "UNEXPECTED" not in caplog.text
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_they_are_rounded_once(path: str, dtype: str) -> None:
    actual = write(path, "gptq act-order")
    model = load_model(path, dtype=dtype)
    for weight, numbers in actual.items():
        assert torch.equal(model.get_parameter(weight), numbers.to(getattr(torch, dtype)))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["gptq act-order", "nf4 double"])
def test_greedy_tokens_are_those_of_the_plain_weights(tmp_path: Path, name: str, model_type: str) -> None:
    """By transformers' modules, or by the native forward pass where codes are not kept; of qwen2 with biases."""
    torch.set_num_threads(1)
    path = make_checkpoint(model_type, tmp_path / "codes")
    plain = shutil.copytree(path, tmp_path / "plain")
    actual = write(path, name)
    rewrite(str(plain), lambda tensors: actual)
    options = {"native_forward": name.startswith("nf4")}
    with LLM(path, dtype="float32", device="cpu", kv_cache_memory="8MiB", **options) as llm:
        assert greedy(llm, PROMPTS) == greedy_reference(str(plain), PROMPTS, [12] * 2)


def test_the_head_and_layers_with_rules_of_their_own(path: str) -> None:
    """`dynamic` excludes the layers that stay plain; the head has a weight of its own, also in a model that ties it."""
    actual = write(path, "gptq", also=("lm_head.weight",), except_for=("k_proj", "layers.0.mlp.up_proj"))
    config = {**CONFIGS["gptq"], "lm_head": True, "dynamic": {"-:.*k_proj": {}, r"-:model\.layers\.0\.mlp\.up": {}}}
    set_quantization(path, config)
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    model = load_model(path)
    assert "lm_head.weight" in actual and len(actual) == 12
    for weight, numbers in actual.items():
        assert torch.equal(model.get_parameter(weight), numbers)
    assert not torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)


def test_biases_of_zeros_are_dropped_and_others_are_added(path: str) -> None:
    """AutoGPTQ writes a bias for every layer, whether or not the model has one."""
    write(path, "gptq")
    zeros, ones = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"
    rewrite(path, lambda _: {f"{zeros}.bias": torch.zeros(48), f"{ones}.bias": torch.ones(48)})
    model = load_model(path)
    assert model.get_submodule(zeros).bias is None
    assert torch.equal(model.get_submodule(ones).bias, torch.ones(48))


def test_names_without_the_models_prefix(path: str) -> None:
    actual = write(path, "nf4 double")
    rewrite(path, lambda t: {name.removeprefix("model."): t.pop(name) for name in list(t) if name != "lm_head.weight"})
    model = load_model(path)
    assert all(torch.equal(model.get_parameter(name), numbers) for name, numbers in actual.items())


def test_int8_beside_it_quantizes_the_dequantised_weights(path: str, tmp_path: Path) -> None:
    """Those of codes that are not kept."""
    plain = str(shutil.copytree(path, tmp_path / "plain"))
    actual = write(path, "nf4")
    rewrite(plain, lambda _: actual)
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 2
    found, expected = (run(make_core(each, quantization="int8"), PROMPTS, params) for each in (path, plain))
    assert [tokens(found[i, 0]) for i in range(2)] == [tokens(expected[i, 0]) for i in range(2)]


def test_fp8_beside_it_quantizes_the_dequantised_weights(path: str) -> None:
    actual = write(path, "gptq")
    with fp8_twins():
        model = load_model(path, quantization="fp8")
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, Fp8Linear)
    weight, expected = layer.weight.float() * layer.weight_scale[:, None], actual[f"{LAYER}.weight"]
    assert 0 < (weight - expected).norm() < 0.04 * expected.norm()


def test_nothing_dense_is_made_before_the_codes_are_read(path: str) -> None:
    """The layers that transformers fills have the tensors of the files; by themselves they compute the products."""
    actual = write(path, "gptq act-order")
    model = _meta_model(path)
    headers = headers_of(Path(path) / "model.safetensors")
    replaced = _replace_linears(model, headers, GptqFormat(CONFIGS["gptq act-order"]))
    assert {f"{name}.weight" for name in replaced} == set(actual)
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, StoredLinear) and not list(layer.parameters())
    assert {name: str(buffer.dtype) for name, buffer in layer.named_buffers()} == {
        "qweight": "torch.int32",
        "qzeros": "torch.int32",
        "scales": "torch.float16",
        "g_idx": "torch.int32",
    }
    layer.to_empty(device="cpu")
    stored = load_file(Path(path) / "model.safetensors")
    for name, buffer in layer.named_buffers():
        buffer.copy_(stored[f"{LAYER}.{name}"])
    x = torch.randn(2, 3, 48)
    expected = x.double() @ actual[f"{LAYER}.weight"].double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert "GptqPacking(bits=4" in repr(layer)


def _meta_model(path: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("name", ["gptq", "int-quantized"])
def test_weights_count_as_they_will_be(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_file(Path(path) / "model.safetensors")
    need = sum(tensor.numel() * 4 for tensor in plain.values())
    write(path, name)
    monkeypatch.setattr(weights, "available_memory", lambda device: need - 1)
    with pytest.raises(LoadError, match=f"the weights of {path!r} take .* more than the"):
        load_model(path)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("gptq", lambda t: t.pop(f"{LAYER}.qzeros") is None, f"{LAYER}.qzeros is in none of its files"),
        ("gptq", lambda t: {f"{LAYER}.qweight": torch.zeros(6, 31, dtype=torch.int32)}, r"has shape \[6, 31\], and"),
        ("gptq", lambda t: {f"{LAYER}.qweight": torch.zeros(6, 32)}, "qweight has dtype F32, not I32"),
        ("gptq", lambda t: {f"{LAYER}.scales": t[f"{LAYER}.scales"] * torch.nan}, "scales has infinite or undefined"),
        ("gptq", lambda t: {f"{LAYER}.g_idx": torch.full((48,), 7, dtype=torch.int32)}, "g_idx names the group 7"),
        ("awq", lambda t: {f"{LAYER}.weight": torch.zeros(32, 48)}, f"no place for 1 of its .*such as {LAYER}.w"),
        ("nf4", lambda t: {f"{LAYER}.weight.absmax": torch.ones(3)}, "weight.absmax has 3 numbers, and the weight 24"),
        (
            "pack-quantized group",
            lambda t: {f"{LAYER}.weight_shape": torch.tensor([2**40, 2**40])},
            r"weight_shape is \[1099511627776, 1099511627776\], and its config.json implies \[32, 48\]",
        ),
        ("gptq", lambda t: {"model.norm.qweight": t[f"{LAYER}.qweight"].clone()}, "belongs to model.norm, a Llama"),
        ("gptq", lambda t: {"x.qweight": t[f"{LAYER}.qweight"].clone()}, "no place for 1 of its tensors, such as x.qw"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(path: str, name: str, change: Any, message: str) -> None:
    write(path, name)
    rewrite(path, change)
    with pytest.raises(LoadError, match=rf"\(llama\) cannot be loaded: .*{message}") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_plain_weights_that_are_called_integers_are_refused(path: str, name: str) -> None:
    set_quantization(path, CONFIGS[name])
    with pytest.raises(
        LoadError, match="none of its linear layers is stored in codes, as its quantization_config says"
    ):
        load_model(path)


def test_a_truncated_file_is_refused(path: str) -> None:
    write(path, "gptq")
    file = Path(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadError, match=r"damaged or incomplete \(.+\); download it again"):
        load_model(path)


def test_what_is_not_supported_names_the_way_out(path: str) -> None:
    write(path, "gptq")
    set_quantization(path, {**CONFIGS["gptq"], "bits": 3})
    with pytest.raises(LoadError, match=r"codes of 3 bits \(supported: 4 and 8\); use .*unquantized checkpoint with"):
        load_model(path)
    groups = CONFIGS["pack-quantized group"]["config_groups"] | compressed_tensors("channel", None)["config_groups"]
    groups["group_1"] = CONFIGS["pack-quantized group"]["config_groups"]["group_0"]
    set_quantization(path, compressed_tensors("channel", None, config_groups=groups))
    with pytest.raises(LoadError, match="quantize some weights to integers and others to floating-point numbers"):
        load_model(path)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=32)
    write(path, "gptq", except_for=("self_attn",))
    with pytest.raises(LoadError, match=r"layers\.0\.mlp\.experts\.0.*qweight contains codes.*experts of a mixture"):
        load_model(path)


def test_files_of_pickles_are_refused(path: str) -> None:
    write(path, "gptq")
    file = Path(path) / "model.safetensors"
    torch.save(load_file(file), Path(path) / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(LoadError, match=r"pytorch_model\.bin is not in the format of safetensors"):
        load_model(path)


ACCEPTED = [("gptq", "gptq"), ("gptq_marlin", "gptq"), ("awq", "awq"), ("awq_marlin", "awq"), ("bitsandbytes", "nf4")]


@pytest.mark.parametrize(
    "asked, name", [*ACCEPTED, ("compressed-tensors", "int-quantized"), ("auto-round", "auto-round gptq")]
)
def test_an_option_that_repeats_the_checkpoints_method(path: str, asked: str, name: str) -> None:
    write(path, name)
    load_model(path, quantization=asked, load_format="bitsandbytes" if name == "nf4" else "auto")


def test_an_option_that_names_another_method(path: str, tmp_path: Path) -> None:
    plain = shutil.copytree(path, tmp_path / "plain")
    write(path, "gptq")
    with pytest.raises(ConfigError, match=rf"quantization='awq', but {path!r} has quant_method='gptq'; remove it"):
        load_model(path, quantization="awq_marlin")
    stored = r"quantization='gptq' names how a checkpoint is stored, and .* is not quantized"
    ways_out = r'; remove it, or set it to "int4", or to "int8" \(on a CPU\) or "fp8" \(on a GPU\), to quantize'
    with pytest.raises(ConfigError, match=stored + ways_out):
        load_model(str(plain), quantization="gptq")


def test_a_draft_model_may_be_stored_in_another_way(path: str, tmp_path: Path) -> None:
    draft = str(shutil.copytree(path, tmp_path / "draft"))
    write(path, "awq")
    speculative = {"model": draft, "num_speculative_tokens": 2}
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)]
    core = make_core(path, quantization="awq", speculative_config=speculative)
    assert len(tokens(run(core, PROMPTS[:1], params)[0, 0])) == 6
