"""llama.cpp's architectures: the configuration that transformers has of each, and its names of tensors.

Only those with a test of parity are here.  llama.cpp's own conversions are undone: it interleaves the halves of each
head of llama's queries and keys, and stores gemma's norms plus 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.gguf.header import GgufError, GgufHeader
from inflight.gguf.rope import rope_parameters
from inflight.gguf.values import Values

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "config_of", "tensor_names"]

_MAX_LAYERS = 1024
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
_LLAMA = _ATTENTION | _MLP | _NORMS
_PHI3 = {
    **_NORMS,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Are part of the configuration.
_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]*)\.)?(?P<part>[a-z0-9_]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        model_type: transformers'.
        parts: of a layer: llama.cpp's names and transformers'.
        further: what its configuration has beside sizes and frequencies.
        interleaved: the rows of queries and keys are.
        norm_offset: what is added to the weights of norms.
    """

    model_type: str
    model_class: str
    parts: Mapping[str, str]
    further: Callable[[Values, dict[str, Any]], dict[str, Any]] = field(default=lambda values, sizes: {})
    interleaved: bool = False
    norm_offset: float = 0.0

    def name_of(self, tensor: str) -> str | None:
        """transformers' name of a tensor; None if its model has no place for it."""
        found = _NAME.fullmatch(tensor)
        if found is None:
            return None
        if found["layer"] is None:
            outer = _OUTER.get(found["part"])
            return None if outer is None else f"{outer}.{found['kind']}"
        part = self.parts.get(found["part"])
        return None if part is None else f"model.layers.{int(found['layer'])}.{part}.{found['kind']}"

    def heads_of(self, tensor: str, config: Mapping[str, Any]) -> int | None:
        """The heads in which the rows of this tensor are interleaved; None if they are not."""
        part = tensor.split(".")[2:3]
        if not self.interleaved or part not in (["attn_q"], ["attn_k"]):
            return None
        return config["num_attention_heads" if part == ["attn_q"] else "num_key_value_heads"]


def architecture_of(header: GgufHeader) -> Architecture:
    """
    Raises:
        GgufError: it is not served.
    """
    name = Values(header).architecture
    if name not in ARCHITECTURES:
        raise GgufError(
            f"its architecture is {name!r:.80} (served as GGUF: {', '.join(ARCHITECTURES)}); use the model's Hugging "
            "Face checkpoint"
        )
    return ARCHITECTURES[name]


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The contents of config.json, without ids of tokens.

    Raises:
        GgufError: the architecture is not served, or metadata is missing, impossible, or contradicts the tensors.
    """
    found, values = architecture_of(header), Values(header)
    sizes = _sizes(values)
    _expect_tensors(values, found, sizes)
    return {
        "architectures": [found.model_class],
        "model_type": found.model_type,
        "dtype": _dtype(header, found),
        "quantization_config": {"quant_method": "gguf"},
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        **sizes,
        **found.further(values, sizes),
    }


def tensor_names(header: GgufHeader) -> dict[str, str]:
    """transformers' name of each tensor that belongs to the model.

    Raises:
        GgufError: the model has no place for one.
    """
    architecture = architecture_of(header)
    names: dict[str, str] = {}
    for name in header.tensors:
        if name in _FACTORS:
            continue
        known = architecture.name_of(name)
        if known is None:
            raise GgufError(
                f"a model of this architecture ({Values(header).architecture}) has no place for its tensor {name}; use "
                "the model's Hugging Face checkpoint"
            )
        names[name] = known
    return names


def _sizes(values: Values) -> dict[str, Any]:
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    layers = values.count("block_count")
    if values.has("expert_count") and values.count("expert_count", least=0):
        raise GgufError("it is a mixture of experts, which is not served as GGUF; use its Hugging Face checkpoint")
    if layers > _MAX_LAYERS:
        raise GgufError(f"{values.architecture}.block_count is {layers}, more than {_MAX_LAYERS}")
    head_dim = values.count("attention.key_length", max(1, hidden // heads))
    if values.count("attention.value_length", head_dim) != head_dim:
        raise GgufError("keys and values have heads of different sizes; use the model's Hugging Face checkpoint")
    embedding = values.header.tensors.get("token_embd.weight")
    vocabulary = embedding.shape[0] if embedding is not None else 0
    values.tensor("token_embd.weight", (vocabulary, hidden))
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.count("context_length"),
    }


def _expect_tensors(values: Values, found: Architecture, sizes: Mapping[str, Any]) -> None:
    """Sizes are those of tensors, which lie in the file: so nothing is as large as the file's word alone says.

    Raises:
        GgufError: they are not, or a layer is missing.
    """
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    rows = {"attn_q": sizes["num_attention_heads"] * head_dim, "attn_k": sizes["num_key_value_heads"] * head_dim}
    rows["attn_qkv"] = rows["attn_q"] + 2 * rows["attn_k"]
    for layer in range(sizes["num_hidden_layers"]):
        for part in rows.keys() & found.parts.keys():
            values.tensor(f"blk.{layer}.{part}.weight", (rows[part], hidden))
        values.tensor(f"blk.{layer}.ffn_down.weight", (hidden, sizes["intermediate_size"]))


def _dtype(header: GgufHeader, architecture: Architecture) -> str:
    """Of the matrices, if they are numbers; codes are dequantised to bfloat16."""
    kinds = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    # gemma's activations exceed the range of float16.
    return "float16" if kinds <= {"F32", "F16"} and not architecture.norm_offset else "bfloat16"


def _full_rope(values: Values, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        GgufError: only a part of each head is rotated.
    """
    head_dim = sizes["head_dim"]
    if values.count("rope.dimension_count", head_dim) != head_dim:
        raise GgufError("only a part of each head is rotated, which this architecture cannot have here")
    return {"rope_parameters": rope_parameters(values, head_dim)}


def _llama(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in values.header.tensors, **_full_rope(values, sizes)}


def _qwen(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, **_full_rope(values, sizes)}


def _granite(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": values.number("attention.scale", sizes["head_dim"] ** -0.5),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
        **_llama(values, sizes),
    }


def _phi3(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    head_dim, hidden = sizes["head_dim"], sizes["hidden_size"]
    if head_dim * sizes["num_attention_heads"] != hidden:
        raise GgufError(f"heads of {head_dim} numbers are no {hidden}; use the model's Hugging Face checkpoint")
    rotated = values.count("rope.dimension_count", head_dim)
    rope = rope_parameters(values, rotated) | {"partial_rotary_factor": rotated / head_dim}
    original = values.count("rope.scaling.original_context_length", sizes["max_position_embeddings"])
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": values.count("attention.sliding_window", 0, least=0) or None,
        "pad_token_id": None,
    }


def _gemma(values: Values, sizes: dict[str, Any], layers_of_largest: int) -> dict[str, Any]:
    """The part that both have.  Queries are scaled by a head's size, except in the largest model, as in llama.cpp."""
    is_largest = sizes["num_hidden_layers"] == layers_of_largest
    scale = sizes["hidden_size"] // sizes["num_attention_heads"] if is_largest else sizes["head_dim"]
    return {
        "query_pre_attn_scalar": scale,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.count("attention.sliding_window"),
        "attn_logit_softcapping": _cap(values, "attn_logit_softcapping"),
        "final_logit_softcapping": _cap(values, "final_logit_softcapping"),
    }


def _cap(values: Values, name: str) -> float | None:
    return values.number(name) if values.has(name) else None


def _gemma2(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    found = _gemma(values, sizes, 46)
    return found | {name: found[name] or cap for name, cap in caps.items()} | _full_rope(values, sizes)


def _gemma3(values: Values, sizes: dict[str, Any]) -> dict[str, Any]:
    plain = rope_parameters(values, sizes["head_dim"])
    theta = values.number("rope.freq_base", 1_000_000.0)
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    pattern = values.count("attention.sliding_window_pattern", 6)
    kinds = ("sliding_attention", "full_attention")
    return {
        **_gemma(values, sizes, 62),
        "rope_parameters": {"full_attention": plain | {"rope_theta": theta}, "sliding_attention": local},
        "layer_types": [kinds[(layer + 1) % pattern == 0] for layer in range(sizes["num_hidden_layers"])],
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, _llama, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA, _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA | _HEAD_NORMS, _qwen),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, _phi3),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA | _HEAD_NORMS, _gemma3, norm_offset=1.0),
    "granite": Architecture("granite", "GraniteForCausalLM", _LLAMA, _granite, interleaved=True),
}
