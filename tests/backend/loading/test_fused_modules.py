"""Small operations of transformers' modules by `FusedOps`: logits are the same, and if not, it is undone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from fp8_twins import fp8_twins
from nightly import ARCHITECTURES_IN_SHORT, nightly_but

from inflight.config import EngineConfig
from inflight.loading.check.cases import cases
from inflight.loading.check.load_check import Reference, reference, relative_error
from inflight.loading.forward.acceleration import use_ops
from inflight.loading.forward.fused_decoder import fuse_modules
from inflight.loading.loader import LoadedModel, load
from inflight.ops.reference_ops import ReferenceOps

CPU = torch.device("cpu")


def prepared(model_type: str, folder: Path, **options: Any) -> tuple[LoadedModel, Reference]:
    torch.set_num_threads(1)
    config = dict(model=make_checkpoint(model_type, folder), device="cpu", dtype="float32", kv_cache_memory="16MiB")
    loaded = load(EngineConfig.from_dict({**config, "native_forward": False, "block_size": 16, **options}))
    found = cases(loaded.info.vocab_size, loaded.info.max_model_len, [], None, 0)
    return loaded, reference(loaded.model, found, CPU)


def error(loaded: LoadedModel, expected: Reference) -> float:
    return relative_error(loaded.model, loaded.backend, expected, 16, CPU)


def fused_kinds(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
def test_every_architecture_computes_the_same(model_type: str, tmp_path: Path) -> None:
    loaded, expected = prepared(model_type, tmp_path)
    before = error(loaded, expected)
    undo = fuse_modules(loaded.model, ReferenceOps(), 256)
    assert error(loaded, expected) < 2e-6
    if undo is not None:
        undo()
    assert not fused_kinds(loaded.model)
    assert error(loaded, expected) == before


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("cohere", "CohereAttention"),  # rotates pairs side by side
        ("gemma2", "Gemma2RMSNorm"),  # multiplies by 1 + weight
        ("olmo2", "Olmo2DecoderLayer"),  # norms come after
        ("olmo2", "Olmo2Attention"),  # norms span all heads
        ("gpt_oss", "GptOssAttention"),  # has sinks
        ("mixtral", "MixtralDecoderLayer"),  # its MLP is a mixture
    ],
)
def test_modules_that_differ_are_unchanged(model_type: str, kept: str, tmp_path: Path) -> None:
    loaded, _ = prepared(model_type, tmp_path)
    assert kept in {type(module).__name__ for module in loaded.model.modules()}
    fuse_modules(loaded.model, ReferenceOps(), 256)
    assert kept not in fused_kinds(loaded.model)


@pytest.mark.parametrize(
    ("model_type", "reasons"),
    [
        ("llama", ""),
        ("granite", ""),
        ("mixtral", "MixtralSparseMoeBlock has experts, gate, not down_proj, gate_proj, up_proj"),
        ("gpt_oss", "GptOssAttention has sinks"),
    ],
)
def test_the_reasons_are_logged_once(model_type: str, reasons: str, tmp_path: Path, caplog) -> None:
    loaded, _ = prepared(model_type, tmp_path)
    with caplog.at_level(logging.INFO, "inflight.loading"):
        fuse_modules(loaded.model, ReferenceOps(), 256)
    messages = [record.getMessage().partition(" runs partly through transformers: ") for record in caplog.records]
    assert [reason for _, found, reason in messages if found] == ([reasons] if reasons else [])


def test_a_different_rotation_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and sizes are llama's; what is passed to attention is not."""
    loaded, _ = prepared("llama", tmp_path)
    module = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    monkeypatch.setattr(module, lambda query, key, cos, sin: (query * cos.unsqueeze(1), key * cos.unsqueeze(1)))
    fuse_modules(loaded.model, ReferenceOps(), 256)
    assert fused_kinds(loaded.model) == {"LlamaRMSNorm", "LlamaMLP"}


def test_in_bfloat16(tmp_path: Path) -> None:
    loaded, expected = prepared("qwen3", tmp_path, dtype="bfloat16")
    fuse_modules(loaded.model, ReferenceOps(), 256)
    assert fused_kinds(loaded.model) == {"Qwen3Model"}
    assert error(loaded, expected) < 0.03


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "phi3", "granite", "gemma2", "mixtral"])
def test_layers_in_fp8(model_type: str, tmp_path: Path) -> None:
    """The same values and scales, whether a layer quantizes its input or what computes it does."""
    with fp8_twins():
        loaded, expected = prepared(model_type, tmp_path, quantization="fp8")
    before = error(loaded, expected)
    undo = fuse_modules(loaded.model, ReferenceOps(), 256)
    assert undo is not None
    # transformers' eager attention differs from the pool's in the last bits, which may round to another e4m3.
    assert error(loaded, expected) <= before + 2e-6
    undo()
    assert error(loaded, expected) == before


@pytest.mark.parametrize("model_type", ["qwen3", "smollm3"])
def test_with_the_gpu_kernels_in_the_interpreter(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from inflight.kernels.gpu.gpu_ops import GpuOps

    loaded, expected = prepared(model_type, tmp_path)
    fuse_modules(loaded.model, GpuOps(), 256)
    assert len(fused_kinds(loaded.model)) == 1
    assert error(loaded, expected) < 2e-6


def test_merged_weights_take_no_extra_memory(tmp_path: Path) -> None:
    loaded, _ = prepared("llama", tmp_path)
    attention = loaded.model.model.layers[0].self_attn
    before = attention.k_proj.weight.clone()
    fuse_modules(loaded.model, ReferenceOps(), 256)
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert torch.equal(attention.k_proj.weight, before)


def test_wrong_logits_undo_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = prepared("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert use_ops(loaded.model, ReferenceOps(), lambda model: False, 256) is loaded.model
    assert not fused_kinds(loaded.model)
    assert "reference ones compute other logits" in caplog.text
    assert fused_kinds(use_ops(loaded.model, ReferenceOps(), lambda model: True, 256))
