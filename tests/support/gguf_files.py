"""Checkpoints as GGUF files, as llama.cpp's converter writes them: by the package `gguf` and numpy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.torch import load_file
from transformers import AutoConfig

__all__ = ["as_gguf", "byte_tokens", "decoded", "random_blocks", "write_gguf"]

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def as_gguf(
    folder: str,
    file: Path,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    further: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `folder` to `file`; returns its weights as the file's codes say, by transformers' names.

    Args:
        kind: of the matrices whose rows consist of whole blocks; the others are in float32.
        metadata: further keys, of any name.
        further: tensors in float32 beside the weights.
        changes: keys of the architecture that differ; None: the key is left out.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    tensors, expected = {}, {}
    for name, stored in load_file(Path(folder) / "model.safetensors").items():
        weight = stored.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        moved = _converted(name, weight, architecture, config)
        tensors[_named(name, architecture)], expected[name] = _encoded(moved, kind, name, weight, architecture, config)
    tensors |= {name: (values, "F32") for name, values in (further or {}).items()}
    keys = {**dict(_keys(config, architecture)), **changes}
    keys = {f"{architecture}.{name}": value for name, value in keys.items() if value is not None}
    write_gguf(file, architecture, {**keys, **byte_tokens(config.vocab_size), **(metadata or {})}, tensors)
    return expected


def _encoded(
    moved: np.ndarray, kind: str, name: str, weight: np.ndarray, architecture: str, config: Any
) -> tuple[tuple[np.ndarray, str], np.ndarray]:
    """The tensor in the file, and the weight that it means."""
    size = quants.GGML_QUANT_SIZES[_type(kind)][0]
    if moved.ndim == 1 or moved.shape[-1] % size or kind == "F32":
        return (moved, "F32"), weight
    codes = random_blocks(moved.shape, kind) if kind.endswith("_K") else quants.quantize(moved, _type(kind))
    return (codes, kind), _restored(decoded(codes, kind), name, architecture, config)


def _type(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind]


def decoded(codes: np.ndarray, kind: str) -> np.ndarray:
    """float32, by the package `gguf`."""
    return quants.dequantize(codes, _type(kind))


def random_blocks(shape: tuple[int, ...], kind: str, seed: int = 0) -> np.ndarray:
    """Codes of weights with a deviation of about 0.2 (`gguf` cannot quantize to the kinds with K)."""
    rng = np.random.default_rng(seed)
    numbers, num_bytes = quants.GGML_QUANT_SIZES[_type(kind)]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, num_bytes), dtype=np.uint8)
    halves = {
        "Q2_K": {80: 0.02, 82: 0.02},
        "Q3_K": {108: 0.003},
        "Q4_K": {0: 8e-4, 2: 3e-4},
        "Q5_K": {0: 4e-4, 2: 3e-4},
    }
    for offset, size in halves.get(kind, {208: 2e-4}).items():
        scale = (size * rng.uniform(0.5, 1.5, blocks.shape[:-1])).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _named(name: str, architecture: str) -> str:
    path, _, kind = name.rpartition(".")
    if path in _OUTER:
        return f"{_OUTER[path]}.{kind}"
    _, _, layer, part = path.split(".", 3)
    parts = _LAYER | _GEMMA if architecture.startswith("gemma") else _LAYER
    return f"blk.{layer}.{parts[part]}.{kind}"


def _converted(name: str, weight: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    heads = _heads(name, architecture, config)
    if heads:
        halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else weight


def _restored(weight: np.ndarray, name: str, architecture: str, config: Any) -> np.ndarray:
    """Undoes `_converted`, row by row."""
    heads = _heads(name, architecture, config)
    if not heads:
        return weight
    size = len(weight) // heads
    order = [head * size + half + 2 * index for head in range(heads) for half in (0, 1) for index in range(size // 2)]
    return weight[order]


def _heads(name: str, architecture: str, config: Any) -> int:
    if architecture not in ("llama", "granite") or (".q_proj." not in name and ".k_proj." not in name):
        return 0
    return config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads


def _keys(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    yield "context_length", config.max_position_embeddings
    yield "embedding_length", config.hidden_size
    yield "block_count", config.num_hidden_layers
    yield "feed_forward_length", config.intermediate_size
    yield "attention.head_count", heads
    yield "attention.head_count_kv", config.num_key_value_heads
    yield "attention.layer_norm_rms_epsilon", float(config.rms_norm_eps)
    yield "rope.freq_base", float(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("llama", "qwen3", "gemma2", "gemma3"):
        yield "attention.key_length", head_dim
        yield "attention.value_length", head_dim
    if architecture in ("llama", "phi3", "granite"):
        yield "rope.dimension_count", int(head_dim * rope.get("partial_rotary_factor", 1))
    if architecture in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        yield "attention.sliding_window", config.sliding_window
    if architecture == "gemma2":
        yield "attn_logit_softcapping", config.attn_logit_softcapping
        yield "final_logit_softcapping", config.final_logit_softcapping
    if architecture == "granite":
        yield "attention.scale", float(config.attention_multiplier)
        yield "embedding_scale", float(config.embedding_multiplier)
        yield "residual_scale", float(config.residual_multiplier)
        yield "logit_scale", float(config.logits_scaling)


def byte_tokens(count: int) -> dict[str, Any]:
    """The tokenizer of a vocabulary of `count` entries: letters, and at last the first two together."""
    tokens = [chr(33 + index) if index < 90 else chr(0x4E00 + index) for index in range(count - 1)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, tokens[0] + tokens[1]],
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * count,
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
    }


def write_gguf(
    file: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
) -> Path:
    """
    Args:
        tensors: by name: values in float32, or blocks as bytes, with their type.
    """
    writer = GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
