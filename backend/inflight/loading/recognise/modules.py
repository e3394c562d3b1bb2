"""Recognises what a transformers module computes: RMS norm, gated MLP, attention, decoder layer of the llama family.

A module is recognised by its structure (names, types and sizes of its children), not by its class, and checked
on random numbers against the definition of what it was recognised as.  The definitions are the dataclasses
here: each computes its module by `FusedOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.attention.base import AttentionMetadata, LayerAttention, LayerSpec, current_batch, forward_context
from inflight.loading.load_errors import NotRecognised
from inflight.loading.quantization.fp8_linear import Fp8Linear
from inflight.loading.recognise.projection import Linear, Projection, is_linear, result_like, takes_quantized
from inflight.ops.base import Angles, FusedOps, HeadNorms, Rows, projection_sizes
from inflight.ops.reference_ops import ReferenceOps

__all__ = [
    "Attention",
    "DecoderLayer",
    "Forward",
    "GatedMlp",
    "NotRecognised",
    "Projection",
    "RmsNorm",
    "Rotary",
    "attention",
    "check",
    "children_of",
    "decoder_layer",
    "gated_mlp",
    "linears_of",
    "rms_norm",
    "rotary",
    "same",
]

Forward = Callable[..., Any]

# Between two ways to compute the input of a layer in fp8: a difference in the last bit of the dtype can round to the
# next of eight numbers.
_FP8_TOLERANCE = 0.05
_VOID = torch.empty(0)
_NO_METADATA = AttentionMetadata(_VOID, _VOID, _VOID, _VOID, [], [], 0, 0, 0)


@dataclass(frozen=True)
class RmsNorm:
    """weight [H]"""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, ops: FusedOps, quantized: bool = False) -> Rows:
        """x [T, H]."""
        return ops.rms_norm(x, self.weight, self.eps, quantized)

    def of_sum(self, x: Tensor, residual: Tensor, factor: float, ops: FusedOps, quantized: bool = False) -> Rows:
        """The norm of residual [T, H] += factor * x [T, H]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, factor, quantized)

    def as_forward(self, ops: FusedOps) -> Forward:
        """A replacement of the module's `forward`."""

        def forward(x: Tensor) -> Tensor:
            return cast(Tensor, self(x.reshape(-1, x.shape[-1]), ops)).view(x.shape)

        return forward


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))"""

    gate_up: Projection
    down: Linear

    def __call__(self, x: Rows, ops: FusedOps) -> Tensor:
        """x [T, H] -> [T, H]."""
        gate_up = self.gate_up(x)
        return self.down(ops.silu_and_mul(gate_up, takes_quantized(self.down)))

    def as_forward(self, ops: FusedOps) -> Forward:
        """A replacement of the module's `forward`."""

        def forward(x: Tensor) -> Tensor:
            return self(x.reshape(-1, x.shape[-1]), ops).view(x.shape)

        return forward


@dataclass(frozen=True)
class Attention:
    """Projections of query, key and value, norms over each head, rotary embedding, attention, output projection.

    Attributes:
        layer: the module's paged attention.
        norms: None if it has none.
        rotary: whether query and key are rotated.
    """

    layer: LayerAttention
    qkv: Projection
    output: Linear
    norms: HeadNorms | None
    rotary: bool

    def __call__(self, x: Rows, angles: Angles, ops: FusedOps) -> Tensor:
        """x [T, H] -> [T, H]; in a forward context."""
        layer, batch = self.layer, current_batch()
        query = ops.rotate_and_write(self.qkv(x), layer, batch, self.norms, angles if self.rotary else None)
        return self.output(layer.backend.attend(query, layer.cache, batch, layer.spec, None).flatten(1))

    def as_forward(self, ops: FusedOps) -> Forward:
        """A replacement of the module's `forward`."""

        def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
            return self(hidden_states[0], _angles(position_embeddings), ops)[None], None

        return forward


@dataclass(frozen=True)
class DecoderLayer:
    """x += factor * attention(norm(x)), then x += factor * mlp(norm(x))."""

    input_norm: RmsNorm
    attention: Attention
    post_norm: RmsNorm
    mlp: GatedMlp
    residual_factor: float

    def __call__(self, normed: Rows, x: Tensor, angles: Angles, ops: FusedOps) -> Tensor:
        """All but the input norm and the last sum, which is computed together with the norm that follows it.

        Args:
            normed: [T, H], the input norm of x; quantized if that is what `attention.qkv` takes.
            x: [T, H]; attention is added in place.

        Returns:
            The MLP's output [T, H], to be added to x.
        """
        out = self.attention(normed, angles, ops)
        quantized = self.mlp.gate_up.takes_quantized
        return self.mlp(self.post_norm.of_sum(out, x, self.residual_factor, ops, quantized), ops)

    def as_forward(self, ops: FusedOps) -> Forward:
        """A replacement of the module's `forward`; updates its input in place."""

        def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
            x = hidden_states[0]
            normed = self.input_norm(x, ops, self.attention.qkv.takes_quantized)
            out = self(normed, x, _angles(position_embeddings), ops)
            return x.add_(out if self.residual_factor == 1.0 else out * self.residual_factor)[None]

        return forward


@dataclass(frozen=True)
class Rotary:
    """cos and sin of position * inverse_frequencies [R / 2], times `scaling`, each concatenated with itself."""

    inverse_frequencies: Tensor
    scaling: float


@torch.no_grad()
def rms_norm(module: Any) -> RmsNorm:
    """Recognise and check an RMS norm.

    Raises:
        NotRecognised: it is something else; the same holds for the functions below.
    """
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        raise NotRecognised(f"{_name(module)} is not an RMS norm")
    norm = RmsNorm(parameters["weight"].data, eps)
    check(module, norm)
    return norm


def gated_mlp(module: nn.Module) -> GatedMlp:
    """Recognise a gated MLP; `check` it before use."""
    children = children_of(module)
    activation = children.pop("act_fn", None) or children.pop("activation_fn", None)
    names = ["gate_up_proj"] if "gate_up_proj" in children else ["gate_proj", "up_proj"]
    _expect_children(module, children, *names, "down_proj")
    x = torch.linspace(-5, 5, 64)
    if activation is None or not torch.allclose(activation(x), F.silu(x)):
        raise NotRecognised(f"{_name(module)} has another activation than SiLU")
    linears = [_linear(children[name]) for name in names]
    down = _linear(children["down_proj"])
    sizes = sum(linear.out_features for linear in linears), down.out_features
    if sizes != (2 * down.in_features, linears[0].in_features):
        raise NotRecognised(f"{_name(module)} has layers of other sizes than a gated MLP")
    return GatedMlp(Projection(tuple(linears)), down)


def attention(module: Any) -> Attention:
    """Recognise attention, with `LayerAttention` attached; `check` it before use."""
    layer = getattr(module, "inflight", None)
    if not isinstance(layer, LayerAttention):
        raise NotRecognised(f"{_name(module)} has no paged attention")
    if layer.spec.has_sinks:
        raise NotRecognised(f"{_name(module)} has sinks")
    spec, children = layer.spec, children_of(module)
    norms = [children.pop(name, None) for name in ("q_norm", "k_norm")]
    names = ["qkv_proj"] if "qkv_proj" in children else ["q_proj", "k_proj", "v_proj"]
    _expect_children(module, children, *names, "o_proj")
    linears, output = [_linear(children[name]) for name in names], _linear(children["o_proj"])
    sizes = projection_sizes(spec)
    expected = [*(sizes if len(linears) == 3 else [sum(sizes)]), spec.num_heads * spec.value_head_size]
    if [*(linear.out_features for linear in linears), output.in_features] != expected:
        raise NotRecognised(f"{_name(module)} has projections of other sizes than its heads")
    if output.out_features != linears[0].in_features:
        raise NotRecognised(f"{_name(module)} has an output projection to another size than its input's")
    rotates = bool(getattr(module, "use_rope", True))
    return Attention(layer, Projection(tuple(linears)), output, _head_norms(module, *norms), rotates)


def decoder_layer(module: nn.Module) -> DecoderLayer:
    """Recognise a decoder layer; `check` it before use."""
    children, names = children_of(module), ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    _expect_children(module, children, *names)
    input_norm, self_attention, post_norm, mlp = (children[name] for name in names)
    factor = float(getattr(module, "residual_multiplier", 1.0))
    return DecoderLayer(rms_norm(input_norm), attention(self_attention), rms_norm(post_norm), gated_mlp(mlp), factor)


@torch.no_grad()
def rotary(module: Any) -> Rotary:
    """Recognise and check a rotary embedding whose frequencies do not depend on the sequence's length."""
    kind = getattr(module, "rope_type", None)
    if kind not in ("default", "linear", "llama3", "yarn", "longrope", "dynamic"):  # the last two: within short lengths
        raise NotRecognised(f"{_name(module)} has a rotary embedding of type {kind}")
    frequencies = module.inv_freq.detach().float().contiguous()
    found = Rotary(frequencies, float(module.attention_scaling))
    positions = torch.tensor([[0, 5, 11]], device=frequencies.device)
    angles = positions[..., None] * frequencies.repeat(2)
    expected = angles.cos() * found.scaling, angles.sin() * found.scaling
    tables = module(torch.zeros(1, device=frequencies.device), positions)
    if not all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(tables, expected)):
        raise NotRecognised(f"{_name(module)} computes other angles than a rotary embedding")
    return found


@torch.no_grad()
def check(module: nn.Module, part: RmsNorm | GatedMlp | Attention | DecoderLayer, ops: FusedOps | None = None) -> None:
    """Compare what `module` computes from random numbers with `part` by `ops` (default: `ReferenceOps`).

    Raises:
        NotRecognised: results differ by more than rounding.
    """
    forward = part.as_forward(ops or ReferenceOps())
    try:
        expected, results = _run(module, part), _run(forward, part)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:  # other arguments, or other shapes
        raise NotRecognised(f"{_name(module)} cannot be called as {_name(part)}: {error}") from error
    in_fp8 = any(isinstance(linear, Fp8Linear) for linear in linears_of(part))
    if not all(same(*pair, _FP8_TOLERANCE if in_fp8 else 0.0) for pair in zip(results, expected)):
        raise NotRecognised(f"{_name(module)} computes something else than {_name(part)}")


def _run(function: Forward, part: RmsNorm | GatedMlp | Attention | DecoderLayer) -> list[Tensor]:
    """Result for random input; with attention, preceded by what it wrote and attended with."""
    if isinstance(part, RmsNorm):
        return [function(_random(3, len(part.weight), like=part.weight))]
    if isinstance(part, GatedMlp):
        return [function(_random(3, part.gate_up.in_features, like=result_like(part.down)))]
    attending = part.attention if isinstance(part, DecoderLayer) else part
    layer, like = attending.layer, result_like(attending.output)
    recorder, backend = _Recorder(), layer.backend
    cos, sin = _random(2, 1, 5, layer.spec.key_head_size, like=like)
    hidden = _random(1, 5, attending.qkv.in_features, like=like)
    layer.backend = recorder
    try:
        with forward_context(_NO_METADATA, recorder):
            out = function(hidden_states=hidden, position_embeddings=(cos, sin), attention_mask=None)
    finally:
        layer.backend = backend
    return [*recorder.seen, out[0] if isinstance(out, tuple) else out]


class _Recorder:
    """An `AttentionBackend` that records its arguments; each token attends only to itself."""

    name = "recorder"
    capturable = False

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def unsupported(self, *_: Any) -> None:
        raise NotImplementedError

    def new_cache(self, *_: Any) -> Any:
        raise NotImplementedError

    def prepare(self, metadata: AttentionMetadata) -> None:
        return None

    def write(self, key: Tensor, value: Tensor, cache: Any, batch: Any) -> None:
        self.seen = [key.clone(), value.clone()]

    def attend(self, query: Tensor, cache: Any, batch: Any, spec: LayerSpec, sinks: Any) -> Tensor:
        self.seen.append(query.clone())
        return self.seen[1].repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)


def children_of(module: nn.Module) -> dict[str, Any]:
    """Children that compute something, by name."""
    idle = (nn.Dropout, nn.Identity)
    return {name: child for name, child in module.named_children() if not isinstance(child, idle)}


def _expect_children(module: nn.Module, children: dict[str, Any], *names: str) -> None:
    if set(children) != set(names):
        raise NotRecognised(f"{_name(module)} has {', '.join(sorted(children))}, not {', '.join(sorted(names))}")
    if list(module.parameters(recurse=False)):
        raise NotRecognised(f"{_name(module)} has parameters besides those of its children")


def _linear(module: Any) -> Linear:
    if not is_linear(module):
        raise NotRecognised(f"{_name(module)} is not a plain linear layer")
    return module


def _head_norms(module: Any, *norms: Any) -> HeadNorms | None:
    if norms == (None, None):
        return None
    if None in norms:
        raise NotRecognised(f"{_name(module)} has a norm for one of query and key only")
    query_norm, key_norm = map(rms_norm, norms)
    if {len(query_norm.weight), len(key_norm.weight)} != {module.inflight.spec.key_head_size}:
        raise NotRecognised(f"{_name(module)} has norms over more than a head")
    if query_norm.eps != key_norm.eps:
        raise NotRecognised(f"{_name(module)} has norms that differ in eps")
    return HeadNorms(query_norm.weight, key_norm.weight, query_norm.eps)


def _angles(position_embeddings: tuple[Tensor, Tensor]) -> Angles:
    """transformers' cos and sin, each [1, T, R]."""
    cos, sin = position_embeddings
    return Angles(cos[0], sin[0], cos.shape[-1])


def same(result: Tensor, expected: Tensor, tolerance: float = 0.0) -> bool:
    """Equal up to a few roundings of the dtype, or to a relative error of `tolerance`."""
    tolerance = max(tolerance, 4 * torch.finfo(expected.dtype).eps)
    return result.shape == expected.shape and bool((result - expected).norm() <= tolerance * expected.norm())


def linears_of(part: RmsNorm | GatedMlp | Attention | DecoderLayer) -> list[Linear]:
    """The linear layers of a part."""
    if isinstance(part, GatedMlp):
        return [*part.gate_up.linears, part.down]
    if isinstance(part, Attention):
        return [*part.qkv.linears, part.output]
    return [*linears_of(part.attention), *linears_of(part.mlp)] if isinstance(part, DecoderLayer) else []


def _random(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _name(thing: Any) -> str:
    return type(thing).__name__
