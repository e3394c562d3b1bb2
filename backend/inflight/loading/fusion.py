"""Recognition of decoders that the native CPU forward pass can run whole.

The families around llama (llama, mistral, qwen2, qwen3, phi3, granite, smollm3 and what is built like
them) are one computation with a few options: RMS norm, attention with rotary positions, RMS norm, gated
MLP.  A model is recognised by its modules, not by its name: their names, kinds and sizes must be exactly
those, and its norms, activation and rotation are tried on random numbers.  What remains (an unusual order,
a multiplier) shows in the check at load, which compares the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from inflight.attention.base import LayerAttention, current_metadata
from inflight.kernels.cpu import ops as native
from inflight.kernels.cpu.attention import CpuAttention
from inflight.loading.packed_linear import drop_weights, shared_weights

__all__ = ["FusedDecoder", "fuse"]

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the others change with the sequence's length
_MAX_HEAD_SIZE = 1024


class NotRecognised(ValueError):
    """The model is not of the family; the message says where it differs."""


class FusedDecoder:
    """Called as the transformers model that it stands for, in a forward context."""

    def __init__(self, tables: native.DecoderTables, attention: list[LayerAttention]) -> None:
        self.tables = tables
        self.attention = attention  # keeps the KV pool, of which the tables have the address
        self.backend = cast(CpuAttention, attention[0].backend)
        self.dtype = tables.embedding.dtype

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | int = 0, use_cache: bool = False
    ) -> SimpleNamespace:
        """input_ids, position_ids int64 [1, T]; kept: the last n (0: all) or int64 [K] -> logits float32 [1, K, V]."""
        if isinstance(logits_to_keep, int):
            logits_to_keep = torch.arange(input_ids.shape[1])[-logits_to_keep:]
        batch = self.backend.batch_address(current_metadata())
        return SimpleNamespace(
            logits=native.forward(self.tables, batch, input_ids[0], position_ids[0], logits_to_keep)[None]
        )


def fuse(model: nn.Module, int8: bool = False) -> tuple[FusedDecoder, Callable[[], None]] | str:
    """Make the native decoder of a loaded model with attention attached; its linear weights move there.

    Args:
        int8: in eight bits, see `PackedWeight`.

    Returns:
        The decoder and a function that gives the weights back to `model`; or why it is not recognised.
    """
    missing = native.unavailable()
    if missing is not None:
        return f"this installation lacks {missing}"
    try:
        return _fuse(model, int8)
    except NotRecognised as reason:
        return str(reason)


def _fuse(model: nn.Module, int8: bool) -> tuple[FusedDecoder, Callable[[], None]]:
    base, head = _children(model, "model", "lm_head")
    embedding, layers, norm, rotary = _children(base, "embed_tokens", "layers", "norm", "rotary_emb")
    _expect(isinstance(embedding, nn.Embedding) and isinstance(layers, nn.ModuleList), "embedding or list of layers")
    inverse_frequencies, rotary_scaling = _rotary(rotary)
    eps = _check_norm(norm, embedding.embedding_dim)
    parts = [_Parts(layer, embedding.embedding_dim, eps, len(inverse_frequencies)) for layer in layers]
    _expect(len({part.residual_factor for part in parts}) == 1, "residual multipliers")
    _check_rotation(parts[0].attention, rotary)
    linears = [module for part in parts for group in part.linears for module in group] + [head]
    for module in linears:
        _check_linear(module, embedding.weight.dtype)
    undone: list[Callable[[], None]] = []
    shared = shared_weights(model)

    def pack(group: list[nn.Linear], gated: bool = False) -> native.PackedWeight:
        packed = native.PackedWeight([m.weight for m in group], [m.bias for m in group], gated, int8)
        undone.append(drop_weights(group, packed, shared))
        return packed

    tables = native.DecoderTables(
        layers=[part.tables(pack) for part in parts],
        embedding=embedding.weight.data.clone(),  # so that nothing holds on to the mapped file
        inverse_frequencies=inverse_frequencies,
        rotary_scaling=rotary_scaling,
        final_norm=_floats(norm),
        head=pack([head]),
        eps=eps,
        embedding_factor=float(getattr(base, "embedding_multiplier", 1.0)),
        residual_factor=parts[0].residual_factor,
        logits_factor=1.0 / float(getattr(model.config, "logits_scaling", 1.0)),
    )

    def undo() -> None:
        for restore in undone:
            restore()

    return FusedDecoder(tables, [part.inflight for part in parts]), undo


class _Parts:
    """One decoder layer, taken apart.

    Raises:
        NotRecognised: it is built differently.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float, num_frequencies: int) -> None:
        self.input_norm, self.attention, self.post_norm, mlp = _children(
            layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
        )
        self.inflight: LayerAttention = getattr(self.attention, "inflight", None)  # type: ignore[assignment]
        _expect(isinstance(getattr(self.inflight, "backend", None), CpuAttention), "attention backend (not cpu)")
        self.rotary = bool(getattr(self.attention, "use_rope", True))
        self.residual_factor = float(getattr(layer, "residual_multiplier", 1.0))
        spec = self.inflight.spec
        _expect(not spec.has_sinks, "attention (it has sinks)")
        _expect(2 * num_frequencies <= spec.key_head_size <= _MAX_HEAD_SIZE, "rotary size")
        for norm in (self.input_norm, self.post_norm):
            _expect(_check_norm(norm, hidden_size) == eps, "eps of the norms")
        self._take_attention(spec, hidden_size, eps)
        self._take_mlp(mlp, hidden_size)
        self.linears = [self.qkv, self.output, self.gate_up, self.down]

    def _take_attention(self, spec: Any, hidden_size: int, eps: float) -> None:
        _expect(not list(self.attention.parameters(recurse=False)), "attention (it has parameters of its own)")
        children = _named(self.attention)
        norms = [children.pop(name, None) for name in ("q_norm", "k_norm")]
        _expect((norms[0] is None) == (norms[1] is None), "norms of query and key")
        self.query_norm, self.key_norm = norms
        for norm in norms:
            _expect(norm is None or _check_norm(norm, spec.key_head_size) == eps, "norm of query or key")
        merged = ["qkv_proj"] if "qkv_proj" in children else ["q_proj", "k_proj", "v_proj"]
        _expect(set(children) == {*merged, "o_proj"}, f"attention (it has {', '.join(sorted(children))})")
        self.qkv = [children[name] for name in merged]
        self.output = [children["o_proj"]]
        sizes = (
            spec.num_heads * spec.key_head_size,
            spec.num_kv_heads * spec.key_head_size,
            spec.num_kv_heads * spec.value_head_size,
        )
        found = tuple(getattr(module, "out_features", 0) for module in self.qkv)
        _expect(found == (sizes if len(merged) == 3 else (sum(sizes),)), "sizes of the projections")
        expected = spec.num_heads * spec.value_head_size, hidden_size
        _expect((self.output[0].in_features, self.output[0].out_features) == expected, "size of the output projection")

    def _take_mlp(self, mlp: nn.Module, hidden_size: int) -> None:
        children = _named(mlp)
        merged = ["gate_up_proj"] if "gate_up_proj" in children else ["gate_proj", "up_proj"]
        activation = children.pop("act_fn", None) or children.pop("activation_fn", None)
        _expect(set(children) == {*merged, "down_proj"}, f"MLP (it has {', '.join(sorted(children))})")
        x = torch.linspace(-5, 5, 64)
        _expect(
            activation is not None and torch.allclose(activation(x), nn.functional.silu(x)), "activation of the MLP"
        )
        self.gate_up = [children[name] for name in merged]
        self.down = [children["down_proj"]]
        width = sum(module.out_features for module in self.gate_up)
        _expect(width == 2 * self.down[0].in_features and self.down[0].out_features == hidden_size, "sizes of the MLP")

    def tables(self, pack: Callable[..., native.PackedWeight]) -> native.LayerTables:
        return native.LayerTables(
            qkv=pack(self.qkv),
            output=pack(self.output),
            gate_up=pack(self.gate_up, gated=True),
            down=pack(self.down),
            input_norm=_floats(self.input_norm),
            post_norm=_floats(self.post_norm),
            query_norm=None if self.query_norm is None else _floats(self.query_norm),
            key_norm=None if self.key_norm is None else _floats(self.key_norm),
            attention=self.inflight.cache.address,  # type: ignore[attr-defined]
            rotary=self.rotary,
        )


def _floats(norm: Any) -> Tensor:
    return norm.weight.detach().to(torch.float32, copy=True)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise NotRecognised(f"its {what} is not one of the llama family's")


def _named(module: nn.Module) -> dict[str, Any]:
    """Children that compute something."""
    idle = (nn.Dropout, nn.Identity)
    return {name: child for name, child in module.named_children() if not isinstance(child, idle)}


def _children(module: nn.Module, *names: str) -> list[Any]:
    """The children of these names; there may be no others."""
    found = _named(module)
    _expect(set(found) == set(names), f"{type(module).__name__} (it has {', '.join(sorted(found))})")
    return [found[name] for name in names]


def _check_linear(module: Any, dtype: torch.dtype) -> None:
    _expect(type(module) is nn.Linear, f"linear layer ({type(module).__name__})")
    _expect(module.weight.dtype == dtype, "mixture of dtypes")
    reason = native.unsupported_weight(module.weight)
    _expect(reason is None, f"linear layer ({reason})")


def _check_norm(norm: Any, size: int) -> float:
    """The eps of an RMS norm over `size` elements."""
    eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight: Any = getattr(norm, "weight", None)
    _expect(isinstance(eps, float) and weight is not None and weight.shape == (size,), f"norm {type(norm).__name__}")
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.inference_mode():
        own = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
        difference = (norm(x).float() - own).abs().max()
        tolerance = 4 * torch.finfo(weight.dtype).eps * own.abs().max()
    _expect(bool(difference <= tolerance) and len(list(norm.parameters())) == 1, f"norm {type(norm).__name__}")
    return float(eps)


def _rotary(module: Any) -> tuple[Tensor, float]:
    kind = getattr(module, "rope_type", None)
    _expect(kind in _STATIC_ROPE, f"rotary embedding ({kind})")
    return module.inv_freq.detach().float().contiguous(), float(module.attention_scaling)


def _check_rotation(attention: Any, rotary: Any) -> None:
    """Try the family's own rotation, which its attention finds in its module."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    _expect(rotate is not None, "rotation")
    assert rotate is not None
    size = attention.inflight.spec.key_head_size
    x = torch.randn(1, 2, 3, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cos, sin = rotary(x, torch.tensor([[0, 5, 40]]))
        half = cos.shape[-1] // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        own = torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)
        try:
            rotated = rotate(x, x, cos, sin)[0]
        except (TypeError, RuntimeError):
            rotated = torch.zeros_like(own)
    _expect(2 * half == 2 * rotary.inv_freq.shape[0] and torch.allclose(own, rotated, atol=1e-5), "rotation")
