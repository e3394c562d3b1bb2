"""GGUF files: weights and greedy tokens of the checkpoint that each was made of, or a line that says why not."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from gguf_files import as_gguf, random_blocks
from offline import make_core, run, tokens
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load

PROMPTS = [[7, 3, 9, 100, 5] * 9, [1, 2, 3]]
# How each differs from the checkpoints of other tests: llama.cpp's files cannot say these things.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=None),
    "qwen2": dict(use_sliding_window=False, layer_types=None),
    "qwen3": {},
    "phi3": dict(sliding_window=24),
    "gemma2": {},
    "gemma3_text": dict(tie_word_embeddings=True),
    "granite": dict(tie_word_embeddings=True, embedding_multiplier=3.0),
}
WIDE = dict(hidden_size=256, intermediate_size=256, head_dim=64)  # rows of one block with 256 numbers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load_model(file: Path, **options: Any) -> nn.Module:
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "native_forward": False}
    return load(EngineConfig.from_dict({"model": str(file), **common, **options})).model


def expect_weights(model: nn.Module, expected: dict[str, np.ndarray], exactly: bool = True) -> None:
    assert expected.keys() >= {name for name, _ in model.named_parameters()}
    for name, weight in expected.items():
        found, wanted = model.get_parameter(name), torch.from_numpy(np.ascontiguousarray(weight))
        assert torch.equal(found, wanted) if exactly else torch.allclose(found, wanted, rtol=0, atol=1e-7), name


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_are_those_of_the_checkpoint(tmp_path: Path, model_type: str) -> None:
    """Also past windows, of gemma with heads of their own size."""
    path = make_checkpoint(model_type, tmp_path, **MODELS[model_type])
    file = tmp_path / "model.gguf"
    expected = as_gguf(path, file)
    core = make_core(str(file), max_num_batched_tokens=24, max_num_seqs=4)
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 2
    deltas = run(core, PROMPTS, params)
    assert [tokens(deltas[index, 0]) for index in (0, 1)] == greedy_reference(path, PROMPTS, [12, 12])
    expect_weights(load_model(file), expected, exactly=not model_type.startswith("gemma"))  # norms are stored plus 1


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_are_those_of_the_codes(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Queries and keys in llama.cpp's order, and the embedding's table, whose rows are codes, too."""
    file = tmp_path / "model.gguf"
    expected = as_gguf(make_checkpoint("llama", tmp_path), file, kind)
    with caplog.at_level(logging.INFO, logger="inflight"):  # other tests start engines, which set its level
        model = load_model(file)
    expect_weights(model, expected)
    assert ("the gguf weights of" in caplog.text) is (kind not in ("F16", "BF16"))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_weights_in_blocks_of_256(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    expected = as_gguf(make_checkpoint("llama", tmp_path, **WIDE), file, kind)
    expect_weights(load_model(file), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_the_dtype_is_that_of_numbers_and_bfloat16_for_codes(tmp_path: Path, kind: str, dtype: str) -> None:
    file = tmp_path / "model.gguf"
    expected = as_gguf(make_checkpoint("llama", tmp_path), file, kind)
    model = load_model(file, dtype="auto")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name), torch.from_numpy(expected[name]).to(getattr(torch, dtype)))


def test_names_of_quantization_and_dummy_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    path = make_checkpoint("llama", tmp_path)
    as_gguf(path, file, "Q8_0")
    load_model(file, quantization="gguf", load_format="gguf")
    load_model(file, load_format="dummy")
    load_model(file, quantization="int8", native_forward=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"quantization='awq', but .* has quant_method='gguf'; remove it"):
        load_model(file, quantization="awq")
    with pytest.raises(ConfigError, match="quantization='gguf' names how a checkpoint is stored"):
        load_model(Path(path), quantization="gguf")


def test_as_a_draft_model(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    file = tmp_path / "model.gguf"
    as_gguf(path, file, "Q8_0")
    core = make_core(path, speculative_config={"method": "draft_model", "model": str(file), "kv_cache_memory": "8MiB"})
    deltas = run(core, PROMPTS[1:], [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)])
    assert tokens(deltas[0, 0]) == greedy_reference(path, PROMPTS[1:], [12])[0]


def rewrite(file: Path, info_of: str, change: bytes, at: int) -> None:
    """Overwrite a field of a tensor's entry in the header, `at` bytes behind its name."""
    content = bytearray(file.read_bytes())
    place = content.index(struct.pack("<Q", len(info_of)) + info_of.encode()) + 8 + len(info_of) + at
    content[place : place + len(change)] = change
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("blk.1.ffn_up.weight", np.nan, "blk.1.ffn_up.weight has infinite or undefined scales; download"),
        ("blk.0.attn_q.weight", np.inf, "blk.0.attn_q.weight has infinite or undefined scales; download"),
        ("blk.0.attn_v.weight", 0, "blk.0.attn_v.weight: all of its scales are zero; download"),
        ("token_embd.weight", np.nan, "token_embd.weight has infinite or undefined scales; download"),
    ],
)
def test_scales_that_mean_nothing(tmp_path: Path, name: str, scale: float, message: str) -> None:
    from inflight.gguf.header import read_header

    file = tmp_path / "model.gguf"
    as_gguf(make_checkpoint("llama", tmp_path), file, "Q4_0")
    info = read_header(file).tensors[name]
    content = np.fromfile(file, np.uint8)
    blocks = content[info.start : info.start + info.num_bytes].reshape(-1, 18)
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    content.tofile(file)
    with pytest.raises(LoadError, match=message) as error:
        load_model(file)
    assert "\n" not in str(error.value)


def test_minimums_that_mean_nothing() -> None:
    from inflight.loading.checkpoint.gguf_format import checked_blocks
    from inflight.loading.quantization.block_weight import BLOCK_KINDS

    blocks = torch.from_numpy(random_blocks((3, 256), "Q4_K"))
    blocks[1, 2:4] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(LoadError, match=r"blk.0.x has infinite or undefined minimums"):
        checked_blocks("blk.0.x", BLOCK_KINDS["Q4_K"], blocks)


def test_a_kind_that_the_installed_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight.loading.checkpoint import gguf_format
    from inflight.loading.quantization.block_weight import BLOCK_KINDS

    monkeypatch.setattr(gguf_format, "_DEQUANTISES", "transformers.integrations.none_such")
    blocks = torch.from_numpy(random_blocks((3, 256), "Q3_K"))
    with pytest.raises(
        LoadError, match=r"blk.0.x is stored as Q3_K, which only newer versions of transformers .*: update"
    ):
        gguf_format.checked_blocks("blk.0.x", BLOCK_KINDS["Q3_K"], blocks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_length": 2**31 - 1}, r"blk.0.ffn_down.weight has shape \[32, 48\], and its metadata says"),
        ({"attention.key_length": 2**30, "attention.value_length": 2**30}, "blk.0.attn_[qk].weight has shape"),
        (
            {"embedding_length": 2**31 - 1},
            r"token_embd.weight has shape \[199, 32\], and its metadata says \[199, 2147",
        ),
        ({"block_count": 2**20}, "llama.block_count is 1048576, more than 1024"),
        ({"block_count": 3}, "the tensor blk.2.[a-z_]+.weight is missing"),
        ({"block_count": 1}, "its metadata describes a model that has no place for blk.1.attn_norm.weight"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0, not one whole number of at least 1"),
        ({"attention.head_count": [4, 4]}, "llama.attention.head_count is an array of 2 values, not one whole number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan, not a number above 0"),
        ({"attention.layer_norm_rms_epsilon": None}, "its metadata has no llama.attention.layer_norm_rms_epsilon"),
        ({"rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0, not a number above 0"),
        ({"rope.scaling.type": "dynamic"}, r"rope.scaling.type is 'dynamic' \(served: linear, yarn\); use the model's"),
        ({"rope.dimension_count": 4}, "only a part of each head is rotated"),
        (
            {"expert_count": 8},
            "it is a mixture of experts, which is not served as GGUF; use its Hugging Face checkpoint",
        ),
        ({"attention.value_length": 16}, "keys and values have heads of different sizes"),
    ],
)
def test_metadata_that_contradicts_the_tensors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Nothing is as large as the file's word alone says."""
    file = tmp_path / "model.gguf"
    as_gguf(make_checkpoint("llama", tmp_path), file, **changes)
    with pytest.raises((LoadError, ConfigError), match=message) as error:
        load_model(file)
    assert "\n" not in str(error.value) and "model.gguf" in str(error.value)


@pytest.mark.parametrize("name", ["blk.00.attn_q.weight", "blk.0.attn_q_a.weight", "mm.0.weight", "blk.0.attn_q"])
def test_a_tensor_without_a_place(tmp_path: Path, name: str) -> None:
    """Also one that would be a second weight of the same layer."""
    file = tmp_path / "model.gguf"
    as_gguf(make_checkpoint("llama", tmp_path), file, further={name: np.ones((32, 32), np.float32)})
    with pytest.raises(
        LoadError, match=rf"this architecture \(llama\) has no place for its tensor {name}; use the model"
    ):
        load_model(file)


def test_a_tensor_of_another_shape_or_type(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    path = make_checkpoint("llama", tmp_path)
    as_gguf(path, file)
    rewrite(file, "blk.1.ffn_gate.weight", struct.pack("<Q", 16), 4)
    with pytest.raises(
        LoadError, match=r"blk.1.ffn_gate.weight has shape \[48, 16\], and its metadata implies \[48, 32\]"
    ):
        load_model(file)
    as_gguf(path, file)
    rewrite(file, "blk.1.ffn_gate.weight", struct.pack("<I", 34), 20)
    with pytest.raises(
        LoadError, match=r"blk.1.ffn_gate.weight is stored as TQ1_0 .*; use a file of the model in Q4_K_M"
    ):
        load_model(file)
