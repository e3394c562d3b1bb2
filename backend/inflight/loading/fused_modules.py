"""A transformers decoder's small operations by `FusedOps`, module by module, in place.

On a GPU a decode step of an eager model is bound by the host: some twenty-five launches a layer, most of
them for norms, rotary embedding and gates.  Here a layer of the llama family takes about a dozen:

    norm | merged query, key, value | norms of heads | rotary | write, attend | output
    add + norm | merged gate, up | silu and mul | down | add

Modules are recognised by what they are made of and by what they do to random numbers, not by their names;
what is not recognised stays as it is.  Nothing is copied for good: merged weights are the memory of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.attention.base import AttentionMetadata, LayerAttention, LayerSpec, current_metadata, forward_context
from inflight.ops.base import FusedOps
from inflight.ops.reference import ReferenceOps

__all__ = ["fuse_modules"]

Forward = Callable[..., Any]

_NOTHING = torch.empty(0)
_NO_BATCH = AttentionMetadata(_NOTHING, _NOTHING, _NOTHING, _NOTHING, [], [], 0, 0, 0)


@torch.no_grad()
def fuse_modules(model: nn.Module, ops: FusedOps) -> Callable[[], None] | None:
    """Let `ops` compute what it can of a loaded model with attention attached (`module.inflight`).

    Returns:
        The function that gives the modules their own forward back, or None when nothing was recognised.
    """
    replaced: list[nn.Module] = []
    for recognise in (_norm, _mlp, _attention, _layer):
        for module in model.modules():
            forward = recognise(module, ops)
            if forward is not None:
                module.forward = forward
                replaced.append(module)

    def undo() -> None:
        for module in replaced:
            del module.forward

    return undo if replaced else None


def _children(module: nn.Module) -> dict[str, Any]:
    """Children that compute something."""
    idle = (nn.Dropout, nn.Identity)
    return {name: child for name, child in module.named_children() if not isinstance(child, idle)}


def _same(got: Tensor, expected: Tensor) -> bool:
    """Equal up to a few roundings of the dtype."""
    tolerance = 4 * torch.finfo(expected.dtype).eps
    return got.shape == expected.shape and bool((got - expected).norm() <= tolerance * expected.norm())


def _random(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _rms_norm(module: Any) -> tuple[Tensor, float] | None:
    """Weight and eps of an RMS norm, or None for any other module."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or module.weight.dim() != 1 or not isinstance(eps, float):
        return None
    weight = parameters["weight"]
    x = _random(3, len(weight), like=weight)
    if not _same(module(x), ReferenceOps().rms_norm(x, weight, eps)):
        return None
    return weight, eps


def _norm(module: nn.Module, ops: FusedOps) -> Forward | None:
    found = _rms_norm(module)
    if found is None:
        return None
    weight, eps = found

    def forward(x: Tensor) -> Tensor:
        return ops.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    return forward


def _merged(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """One weight (and bias) for layers of one input, whose own parameters become views of it."""
    if not all(type(linear) is nn.Linear for linear in linears):
        return None
    if len({linear.bias is None for linear in linears}) > 1 or len({linear.weight.dtype for linear in linears}) > 1:
        return None
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    merged = []
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None:
            continue
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts])):
            part.data = view
        merged.append(whole)
    return merged[0], merged[1] if len(merged) > 1 else None


def _mlp(module: nn.Module, ops: FusedOps) -> Forward | None:
    """down(silu(gate(x)) * up(x))"""
    children = _children(module)
    activation = children.pop("act_fn", None) or children.pop("activation_fn", None)
    names = ["gate_up_proj"] if "gate_up_proj" in children else ["gate_proj", "up_proj"]
    if activation is None or set(children) != {*names, "down_proj"} or list(module.parameters(recurse=False)):
        return None
    x = torch.linspace(-5, 5, 64)
    down = children["down_proj"]
    if type(down) is not nn.Linear or not torch.allclose(activation(x), F.silu(x)):
        return None
    merged = _merged([children[name] for name in names])
    if merged is None or len(merged[0]) != 2 * down.in_features:
        return None
    weight, bias = merged

    def forward(x: Tensor) -> Tensor:
        return down(ops.silu_and_mul(F.linear(x.reshape(-1, x.shape[-1]), weight, bias))).view(x.shape)

    tried = _random(3, weight.shape[1], like=weight)
    return forward if _same(forward(tried), module(tried)) else None


def _head_norms(children: dict[str, Any], head_size: int) -> tuple[Any, Any] | None:
    """Weight and eps of the norms over query's and key's heads, (None, None) without; None: others."""
    norms = [children.pop(name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return None, None
    found = [None if norm is None else _rms_norm(norm) for norm in norms]
    if any(norm is None or len(norm[0]) != head_size for norm in found):
        return None
    return found[0], found[1]


def _attention(module: nn.Module, ops: FusedOps) -> Forward | None:
    layer = getattr(module, "inflight", None)
    if not isinstance(layer, LayerAttention) or layer.spec.has_sinks or list(module.parameters(recurse=False)):
        return None
    spec, children = layer.spec, _children(module)
    norms = _head_norms(children, spec.key_head_size)
    names = ["qkv_proj"] if "qkv_proj" in children else ["q_proj", "k_proj", "v_proj"]
    if norms is None or set(children) != {*names, "o_proj"}:
        return None
    merged = _merged([children[name] for name in names])
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    sizes = [n * d for n, d in zip(heads, (spec.key_head_size, spec.key_head_size, spec.value_head_size))]
    if merged is None or len(merged[0]) != sum(sizes):
        return None
    (weight, bias), (query_norm, key_norm), output = merged, norms, children["o_proj"]
    rotates = bool(getattr(module, "use_rope", True))

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        parts = F.linear(hidden_states[0], weight, bias).split(sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads))
        if query_norm is not None:
            query, key = ops.rms_norm(query, *query_norm), ops.rms_norm(key, *key_norm)
        if rotates:
            ops.rotary(query, key, *(table[0] for table in position_embeddings))
        metadata = current_metadata()
        layer.backend.write(key, value, layer.cache, metadata)
        out = layer.backend.attend(query, layer.cache, metadata, spec, None)
        return output(out.flatten(1))[None], None

    return forward if _agree(module, forward, layer, weight) else None


def _layer(module: nn.Module, ops: FusedOps) -> Forward | None:
    """x + attention(norm(x)), then x + mlp(norm(x)): the sums are made in place."""
    children = _children(module)
    if set(children) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return None
    if float(getattr(module, "residual_multiplier", 1.0)) != 1.0:
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    first, second = children["input_layernorm"], _rms_norm(children["post_attention_layernorm"])
    if second is None or not all("forward" in vars(child) for child in (first, attention, mlp)):
        return None
    weight, eps = second

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        residual = hidden_states[0]
        out, _ = attention(first(hidden_states), **kwargs)
        normed = ops.add_rms_norm(out[0], residual, weight, eps)
        return residual.add_(mlp(normed))[None]

    return forward if _agree(module, forward, attention.inflight, weight) else None


class _Recorder:
    """Stands for an attention backend: notes what it is given, and lets each token see only itself."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def write(self, key: Tensor, value: Tensor, cache: Any, metadata: Any) -> None:
        self.seen = [key.clone(), value.clone()]

    def attend(self, query: Tensor, cache: Any, metadata: Any, spec: LayerSpec, sinks: Any) -> Tensor:
        self.seen.append(query.clone())
        return self.seen[1].repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)


def _agree(module: nn.Module, forward: Forward, layer: LayerAttention, like: Tensor) -> bool:
    """Whether `forward` gives attention the same query, key and value as `module`, and the same result."""
    recorder, backend = _Recorder(), layer.backend
    size = like.shape[-1]
    cos, sin = _random(2, 1, 5, layer.spec.key_head_size, like=like)
    results: list[list[Tensor]] = []
    layer.backend = recorder  # type: ignore[assignment]
    try:
        with forward_context(_NO_BATCH):
            for function in (module, forward):
                hidden = _random(1, 5, size, like=like)
                out = function(hidden_states=hidden, position_embeddings=(cos, sin), attention_mask=None)
                results.append([*recorder.seen, out[0] if isinstance(out, tuple) else out])
    except (TypeError, RuntimeError, ValueError, AttributeError):  # it wants other arguments, or other shapes
        return False
    finally:
        layer.backend = backend
    return all(_same(got, own) for own, got in zip(*results))
