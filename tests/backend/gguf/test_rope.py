"""Scaled rotary embeddings in a GGUF file: the frequencies of the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import as_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from inflight.gguf.architectures import config_of
from inflight.gguf.header import GgufError, read_header

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
    rope_theta=500000.0,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.5, 2.0],
    long_factor=[1.0, 2.5, 7.25],
    original_max_position_embeddings=64,
    partial_rotary_factor=0.75,
)


def rotary(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config).model.rotary_emb


def frequencies(config: Any) -> torch.Tensor:
    return rotary(config).inv_freq


def read(file: Path) -> Any:
    found = config_of(read_header(file))
    return AutoConfig.for_model(found.pop("model_type"), **found)


def test_llama3_from_the_divisors_that_the_file_has(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, rope_parameters=LLAMA3, head_dim=64, max_position_embeddings=131072)
    theirs = AutoConfig.from_pretrained(path)
    plain = AutoConfig.from_pretrained(path, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    divisors = (frequencies(plain) / frequencies(theirs)).numpy()
    assert ((divisors > 1.01) & (divisors < 7.9)).any() and divisors.max() == 8, "some are between the two"
    as_gguf(path, tmp_path / "model.gguf", further={"rope_freqs.weight": divisors})
    ours = read(tmp_path / "model.gguf")
    assert torch.equal(frequencies(ours), frequencies(theirs))
    as_gguf(path, tmp_path / "other.gguf", further={"rope_freqs.weight": np.sqrt(divisors)})
    with pytest.raises(
        GgufError, match=r"rope_freqs.weight contains other factors than those of Llama 3; use the model's"
    ):
        read(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [
        ("llama", dict(rope_type="linear", factor=4.0)),
        ("qwen2", dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
        ("gemma3_text", dict(rope_type="linear", factor=8.0)),
    ],
)
def test_scaling_in_the_metadata(tmp_path: Path, model_type: str, scaling: dict[str, Any]) -> None:
    rope: dict[str, Any] = {"rope_theta": 12345.0, **scaling}
    if model_type == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    path = make_checkpoint(model_type, tmp_path, rope_parameters=rope)
    keys = {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if "original_max_position_embeddings" in scaling:
        keys["rope.scaling.original_context_length"] = 64
    as_gguf(path, tmp_path / "model.gguf", **keys)
    ours, theirs = (
        dict(rotary(config).named_buffers())
        for config in (read(tmp_path / "model.gguf"), AutoConfig.from_pretrained(path))
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_longrope_of_a_part_of_each_head(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, rope_parameters=dict(LONG), original_max_position_embeddings=64)
    factors = {
        f"rope_factors_{kind}.weight": np.array(LONG[f"{kind}_factor"], np.float32) for kind in ("long", "short")
    }
    keys = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    as_gguf(path, tmp_path / "model.gguf", further=factors, **keys)
    ours, theirs = read(tmp_path / "model.gguf"), AutoConfig.from_pretrained(path)
    assert torch.equal(frequencies(ours), frequencies(theirs)) and len(frequencies(ours)) == 3
    assert ours.rope_parameters == theirs.rope_parameters | {"attention_factor": 1.25}


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            None,
            "its metadata has no llama.rope.scaling.orig",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 2.0},
            None,
            "llama.rope.scaling.yarn_ext_factor is 2.0, not 1; use the model's Hugging Face checkpoint",
        ),
        ({}, np.array([1, 2, 3], np.float32), r"rope_freqs.weight has shape \[3\], and its metadata says \[4\]"),
        ({}, np.array([1, 2, 3, np.nan], np.float32), "rope_freqs.weight has numbers that are not above 0"),
    ],
)
def test_others_are_refused(tmp_path: Path, changes: dict[str, Any], factors: np.ndarray | None, message: str) -> None:
    further = {} if factors is None else {"rope_freqs.weight": factors}
    as_gguf(make_checkpoint("llama", tmp_path), tmp_path / "model.gguf", further=further, **changes)
    with pytest.raises(GgufError, match=message):
        read(tmp_path / "model.gguf")
