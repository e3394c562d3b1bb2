"""Small operations of transformers' modules by `FusedOps`: what is recognised, and that it says the same."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint

from inflight.config import EngineConfig
from inflight.loading.acceleration import use_ops
from inflight.loading.fused_modules import fuse_modules
from inflight.loading.loader import LoadedModel, load
from inflight.loading.self_check import Reference, reference, relative_error
from inflight.ops.reference import ReferenceOps

CPU = torch.device("cpu")
WHOLE = {"llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"}


def prepared(model_type: str, folder: Path, **options: Any) -> tuple[LoadedModel, Reference]:
    torch.set_num_threads(1)
    config = dict(model=make_checkpoint(model_type, folder), device="cpu", dtype="float32", kv_cache_memory="16MiB")
    loaded = load(EngineConfig.from_dict({**config, "native_forward": False, "block_size": 16, **options}))
    return loaded, reference(loaded.model, loaded.info.vocab_size, [7, 12], CPU)


def fused_kinds(model: Any) -> dict[str, int]:
    return Counter(type(module).__name__ for module in model.modules() if "forward" in vars(module))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_says_the_same(model_type: str, tmp_path: Path) -> None:
    loaded, expected = prepared(model_type, tmp_path)
    before = relative_error(loaded.model, expected, 16, CPU)
    undo = fuse_modules(loaded.model, ReferenceOps())
    assert relative_error(loaded.model, expected, 16, CPU) < 2e-6
    layers = loaded.model.config.num_hidden_layers
    if model_type in WHOLE:
        norms = 4 * layers + 1 if model_type == "qwen3" else 2 * layers + 1
        assert sorted(fused_kinds(loaded.model).values()) == sorted([layers, layers, layers, norms])
    if undo is not None:
        undo()
    assert not fused_kinds(loaded.model)
    assert relative_error(loaded.model, expected, 16, CPU) == before


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("cohere", "CohereAttention"),  # rotates pairs side by side
        ("gemma2", "Gemma2RMSNorm"),  # multiplies by 1 + weight
        ("granite", "GraniteDecoderLayer"),  # scales what it adds
        ("olmo2", "Olmo2DecoderLayer"),  # norms come after
        ("olmo2", "Olmo2Attention"),  # norms span all heads
        ("gpt_oss", "GptOssAttention"),  # has sinks
        ("mixtral", "MixtralDecoderLayer"),  # its MLP is a mixture
    ],
)
def test_what_differs_stays(model_type: str, kept: str, tmp_path: Path) -> None:
    loaded, _ = prepared(model_type, tmp_path)
    assert kept in {type(module).__name__ for module in loaded.model.modules()}
    fuse_modules(loaded.model, ReferenceOps())
    assert kept not in fused_kinds(loaded.model)


def test_a_rotation_by_other_rules_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and sizes are llama's; what attention is given is not."""
    loaded, _ = prepared("llama", tmp_path)
    module = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    monkeypatch.setattr(module, lambda query, key, cos, sin: (query * cos.unsqueeze(1), key * cos.unsqueeze(1)))
    fuse_modules(loaded.model, ReferenceOps())
    assert set(fused_kinds(loaded.model)) == {"LlamaRMSNorm", "LlamaMLP"}


def test_in_bfloat16(tmp_path: Path) -> None:
    loaded, expected = prepared("qwen3", tmp_path, dtype="bfloat16")
    fuse_modules(loaded.model, ReferenceOps())
    assert len(fused_kinds(loaded.model)) == 4
    assert relative_error(loaded.model, expected, 16, CPU) < 0.03


@pytest.mark.parametrize("model_type", ["qwen3", "smollm3"])
def test_by_the_kernels_in_the_interpreter(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from inflight.kernels.gpu.gpu_ops import GpuOps

    loaded, expected = prepared(model_type, tmp_path)
    fuse_modules(loaded.model, GpuOps())
    assert len(fused_kinds(loaded.model)) == 4
    assert relative_error(loaded.model, expected, 16, CPU) < 2e-6


def test_merged_weights_are_no_copies(tmp_path: Path) -> None:
    loaded, _ = prepared("llama", tmp_path)
    attention = loaded.model.model.layers[0].self_attn
    before = attention.k_proj.weight.clone()
    fuse_modules(loaded.model, ReferenceOps())
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert torch.equal(attention.k_proj.weight, before)


def test_wrong_logits_take_it_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = prepared("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert use_ops(loaded.model, ReferenceOps(), lambda model: False) is loaded.model
    assert not fused_kinds(loaded.model)
    assert "reference ones give other logits" in caplog.text
    assert fused_kinds(use_ops(loaded.model, ReferenceOps(), lambda model: True))
