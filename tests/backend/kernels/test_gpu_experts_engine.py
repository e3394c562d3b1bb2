"""Engines with experts by the kernels, on an emulated card: MXFP4 in four bits, plain weights, captured steps."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from mxfp4_checkpoints import make_mxfp4_checkpoint
from nightly import nightly_but
from offline import run, tokens
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from card_rig import card_core, functions_as_kernels, num_replays

from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels import registry
from inflight.kernels.gpu import gpu_experts
from inflight.kernels.gpu.gpu_experts import GpuExperts
from inflight.kernels.gpu.launch import interpreted
from inflight.loading import loader
from inflight.loading.check import load_check
from inflight.loading.checkpoint import mxfp4_checkpoint
from inflight.loading.forward import fused_experts
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import LoadedModel, load
from inflight.loading.quantization.mxfp4_experts import Mxfp4Experts

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.usefixtures("card", "small_kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
ONE_LAYER = {"num_hidden_layers": 1}  # where layers do not matter: it loads in half the time
FUSED = {"kernel_config": {"fused_experts": True}}
PROMPTS = [[5, 9, 30, 2, 77], [8], [100, 3, 55, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=4, ignore_eos=True, seed=3),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=2),
]


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of experts; functions of torch in place of all others."""
    functions_as_kernels(monkeypatch)
    torch.set_num_threads(1)
    monkeypatch.setattr(loader, "_CHECKED_TOKENS", 8)  # the interpreter takes milliseconds for each program
    monkeypatch.setattr(loader, "_REPEATS", 2)
    monkeypatch.setattr(gpu_experts, "_TILES", gpu_experts._TILES[:1])


def loaded(path: str, **options: Any) -> LoadedModel:
    """Its memory is not sized yet."""
    values = dict(model=path, device="cuda", dtype="bfloat16", num_gpu_blocks_override=64, max_model_len=64)
    return load(EngineConfig.from_dict({**values, **options}))


def error(model: LoadedModel) -> float:
    """Relative error of its logits, against transformers' in float32 with the same weights."""
    assert model.sizing is not None
    return model.sizing.check.error(model.model)


def experts_of(model: LoadedModel) -> list[torch.nn.Module]:
    return [module for module in model.model.modules() if type(module).__name__.endswith("Experts")]


def by_kernels(model: LoadedModel) -> bool:
    return all("forward" in vars(module) for module in experts_of(model))


@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["bfloat16", "float16"]))
def test_mxfp4_stays_in_four_bits(dtype: str, tmp_path: Path) -> None:
    """The logits are as near to those in float32 as those of unpacked experts; the memory is a quarter."""
    path = make_mxfp4_checkpoint(tmp_path)
    packed, unpacked = loaded(path, dtype=dtype, **FUSED), loaded(path, dtype=dtype)
    assert [type(module) for module in experts_of(packed)] == [Mxfp4Experts] * 2
    assert by_kernels(packed)
    assert not by_kernels(unpacked)
    assert error(packed) < 2 * error(unpacked) + 1e-3
    sizes = [sum(p.nbytes for p in experts_of(model)[0].parameters() if p.dim() > 2) for model in (packed, unpacked)]
    assert sizes[0] / sizes[1] == (0.5 + 1 / 32) / 2


def test_float32_unpacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_mxfp4_checkpoint(tmp_path, **ONE_LAYER)
    model = loaded(path, dtype="float32", **FUSED)
    assert not any(isinstance(module, Mxfp4Experts) for module in experts_of(model))
    assert by_kernels(model), "the unpacked experts are plain ones"
    assert "unpacked: the kernel needs dtype bfloat16 or float16, not torch.float32" in caplog.text


@pytest.mark.parametrize("dtype", nightly_but(["float16"], ["float32", "float16"]))
def test_unpacked_experts_have_the_dtype_of_the_model(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 gives them bfloat16, whatever it is asked for."""
    pretrained = mxfp4_checkpoint.pretrained

    def in_bfloat16(*args: Any, **options: Any) -> torch.nn.Module:
        model = pretrained(*args, **options)
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.to(torch.bfloat16)
        return model

    monkeypatch.setattr(mxfp4_checkpoint, "pretrained", in_bfloat16)
    model = loaded(make_mxfp4_checkpoint(tmp_path, **ONE_LAYER), dtype=dtype)
    assert {weight.dtype for weight in experts_of(model)[0].parameters()} == {getattr(torch, dtype)}


def test_a_scale_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    path = make_mxfp4_checkpoint(tmp_path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 0] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"a scale of model\.layers\.1\.mlp\.experts is not a number \(code 255\)"):
        loaded(path, **FUSED)


@pytest.mark.parametrize("name", ["gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = make_mxfp4_checkpoint(tmp_path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.0.mlp.experts.{name}"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=rf"model\.layers\.0\.mlp\.experts\.{name}"):
        loaded(path, **FUSED)


@pytest.mark.nightly
def test_memory_is_checked_for_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with room for the packed weights only, beside embeddings in float32, refuses the unpacked ones."""
    from inflight.loading.checkpoint import weights

    path = make_mxfp4_checkpoint(tmp_path, intermediate_size=128, vocab_size=19)
    size = sum(
        tensor.nbytes for tensor in load_file(Path(path) / "model.safetensors").values()
    )  # plain ones in float32
    monkeypatch.setattr(weights, "available_memory", lambda device: size)
    assert by_kernels(loaded(path, **FUSED))
    with pytest.raises(LoadError, match="more than the"):
        loaded(path)


@pytest.mark.parametrize("model_type", nightly_but(["qwen3_moe"], ["qwen3_moe", "mixtral", "gpt_oss"]))
def test_plain_experts(model_type: str, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    fused = loaded(path, dtype="float32", **FUSED)
    assert by_kernels(fused)
    assert error(fused) < load_check.EXACT


def test_wrong_kernels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Plain experts run through transformers instead; a checkpoint in four bits is refused."""
    right = GpuExperts.experts
    monkeypatch.setattr(GpuExperts, "experts", lambda self, x, *args: 1.5 * right(self, x, *args))
    path = make_checkpoint("qwen3_moe", tmp_path, **ONE_LAYER)
    model = loaded(path, **FUSED)
    assert not by_kernels(model)
    assert "run through transformers: they compute other logits" in caplog.text
    packed = make_mxfp4_checkpoint(tmp_path, **ONE_LAYER)
    with pytest.raises(LoadError, match="fused_experts does not work here: they compute other logits; remove it"):
        loaded(packed, **FUSED)


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(GpuExperts, "prepare", fail)
    assert not by_kernels(loaded(make_checkpoint("mixtral", tmp_path, **ONE_LAYER), **FUSED))
    assert "run through transformers: no such instruction" in caplog.text


def test_a_gate_of_another_kind_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path, hidden_act="gelu", **ONE_LAYER)
    assert not by_kernels(loaded(path, dtype="float32", **FUSED))
    assert "run through transformers: Qwen3MoeExperts has a gate of its own" in caplog.text


def test_experts_of_transformers_5_17_do_not_say_whether_they_have_a_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_experts = fused_experts._plain_experts

    def without(module: torch.nn.Module) -> Any:
        module.__dict__.pop("has_post_expert_norm", None)
        return plain_experts(module)

    monkeypatch.setattr(fused_experts, "_plain_experts", without)
    assert by_kernels(loaded(make_checkpoint("qwen3_moe", tmp_path, **ONE_LAYER), dtype="float32", **FUSED))


def test_other_experts_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """llama4's do not implement transformers' interface; llama has none."""
    caplog.set_level(logging.INFO)
    loaded(make_checkpoint("llama4_text", tmp_path), dtype="float32", **FUSED)
    loaded(make_checkpoint("llama", tmp_path), dtype="float32", **FUSED)
    assert caplog.text.count("fused_experts computes 0 layers") == 2


def test_a_cpu_refuses_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "interpreted", lambda: False)
    with pytest.raises(ConfigError, match="kernel_config: fused_experts cannot be used"):
        loaded(make_mxfp4_checkpoint(tmp_path), device="cpu", **FUSED)


def outputs(path: str, **options: Any) -> tuple[dict[tuple[int, int], list[int]], Any]:
    limits = dict(max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks_override=8, max_model_len=16, block_size=4)
    core = card_core(path, check_on_load=False, **limits, **options)
    return {key: tokens(deltas) for key, deltas in run(core, PROMPTS, PARAMS).items()}, core


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("mxfp4", "bfloat16"), pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.nightly)]
)
def test_decode_steps_are_captured(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Whatever the routing; with the tokens of experts by transformers."""
    make = partial(make_checkpoint, model_type) if model_type != "mxfp4" else make_mxfp4_checkpoint
    path = make(tmp_path, **ONE_LAYER)
    expected, _ = outputs(path, dtype=dtype, enforce_eager=True)
    found, core = outputs(path, dtype=dtype, **FUSED)
    assert found == expected
    replays = {bucket.rows: count for bucket, count in num_replays(core).items()}
    assert sorted(replays) == [1, 2]
    assert all(replays.values()), replays
