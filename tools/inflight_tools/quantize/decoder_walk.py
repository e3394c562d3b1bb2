"""From layer to layer of a decoder: each is read, gets inputs from the layers before it as quantized, is quantized.

A layer is x += f * attention(norm(x)), then x += f * mlp(norm(x)).  Its linear layers are quantized in the order in
which they compute, so that the inputs of each have passed through those before it in four bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inflight_tools.quantize.gptq import Codes, Hessian, Undefined, gptq
from inflight_tools.quantize.refused import Refused
from inflight_tools.quantize.source import HEAD, Source

__all__ = ["Quantized", "Scheme", "Walk"]

_MERGED = {"self_attn": ("qkv_proj", "q_proj", "k_proj", "v_proj"), "mlp": ("gate_up_proj", "gate_proj", "up_proj")}
_ESTIMATED = 4  # of so many outputs, one is in the estimate of a layer's error
_LAST = {"self_attn": "o_proj", "mlp": "down_proj"}


@dataclass(frozen=True)
class Scheme:
    """How weights are stored.

    Attributes:
        group: inputs with a common scale.
        head_bits: 16: as it is.
    """

    group: int
    head_bits: int
    bits: int = 4

    def fits(self, num_inputs: int) -> bool:
        return num_inputs % self.group == 0


@dataclass(frozen=True)
class Quantized:
    """The linear layers of a decoder layer, or the head.

    Attributes:
        codes: by the name of the layer.
        errors: by the same: the relative error of the layer's outputs on the samples.
    """

    codes: dict[str, Codes]
    errors: dict[str, float]


class Walk:
    """The samples on their way through the decoder.

    Args:
        samples: token ids, each at least one.

    Attributes:
        hidden: float32 [T, H] of each sample: the inputs of the next layer.
    """

    @torch.inference_mode()
    def __init__(self, source: Source, samples: Sequence[Sequence[int]], scheme: Scheme) -> None:
        self._source, self._scheme = source, scheme
        self.hidden: list[Tensor] = []
        self._given: list[list[dict[str, Any]]] = []  # to each layer besides hidden states, for each sample
        known: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            first, given = _begin(source, torch.tensor(sample))
            self.hidden.append(first)
            self._given.append(known.setdefault(len(sample), given))

    @torch.inference_mode()
    def layer(self, index: int) -> Quantized:
        """Quantize a decoder layer, and bring the samples through it.

        Raises:
            Refused: a weight or an input in it is infinite or not a number.
        """
        name = f"model.layers.{index}"
        layer: Any = self._source.layers[index]
        factor = float(getattr(layer, "residual_multiplier", 1.0))
        found = Quantized({}, {})
        self._source.fill(layer, name)
        try:
            for part, norm in (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
                module, given = getattr(layer, part), [each[index] for each in self._given]
                run = _attention if part == "self_attn" else _mlp
                normed = [getattr(layer, norm)(x) for x in self.hidden]
                merged = [child for child in _MERGED[part] if hasattr(module, child)]
                self._quantize(f"{name}.{part}", module, merged, normed, found)
                last = getattr(module, _LAST[part])
                with _passing(module, _LAST[part]):
                    inner = [run(module, x, kwargs) for x, kwargs in zip(normed, given)]
                self._quantize(f"{name}.{part}", module, [_LAST[part]], inner, found)
                for x, y in zip(self.hidden, inner):
                    x.add_(last(y), alpha=factor)
        finally:
            self._source.empty(layer)
        return found

    @torch.inference_mode()
    def head(self) -> Quantized:
        """Quantize the head, after all layers.

        Raises:
            Refused: see `layer`.
        """
        norm: Any = self._source.model.model.norm
        found, holder = Quantized({}, {}), nn.Module()
        self._source.fill(norm, "model.norm")
        weight = self._source.weight_of_head()
        holder.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        holder.lm_head.weight = nn.Parameter(weight.float(), requires_grad=False)
        self._quantize("", holder, [HEAD], [norm(x) for x in self.hidden], found, self._scheme.head_bits)
        return found

    def _quantize(
        self, prefix: str, parent: Any, names: Sequence[str], inputs: Sequence[Tensor], found: Quantized, bits: int = 0
    ) -> None:
        """Quantize layers with common inputs, unless their number does not fit the group."""
        linears = [getattr(parent, name) for name in names]
        if not self._scheme.fits(linears[0].in_features):
            return
        hessian = Hessian(linears[0].in_features)
        for x in inputs:
            hessian.add(x)
        weight = torch.cat([linear.weight for linear in linears])
        try:
            whole = gptq(weight, hessian, bits or self._scheme.bits, self._scheme.group, self._source.dtype)
        except Undefined as error:
            raise Refused(f"{self._source.folder}: {prefix}.{names[0]} cannot be quantized: {error}") from error
        parts = whole.split([linear.out_features for linear in linears])
        for name, linear, codes in zip(names, linears, parts):
            dequantized = codes.dequantize()
            full = f"{prefix}.{name}".lstrip(".")
            found.codes[full] = codes
            found.errors[full] = _relative_error(linear.weight, dequantized, hessian.matrix)
            linear.weight.data = dequantized


def _begin(source: Source, token_ids: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """The first layer's inputs, and what the model gives each layer besides: masks, angles."""
    base, layers = source.model.model, source.layers
    given: list[dict[str, Any]] = []
    first: list[Tensor] = []

    def stand_in(hidden_states: Tensor, **others: Any) -> Tensor:
        first.append(hidden_states)
        given.append(others)
        return hidden_states

    places = {"norm": nn.Identity(), "rotary_emb": source.rotary_embedding}
    with _replaced(base, places), _replaced_forward(layers, stand_in):
        base(inputs_embeds=source.embedded(token_ids)[None], use_cache=False)
    return first[0][0].clone(), given


def _attention(module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
    return module(hidden_states=x[None], **given)[0][0]


def _mlp(module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
    return module(x)


def _relative_error(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> float:
    """Of outputs, by the norm: sqrt(tr(D H D^T) / tr(W H W^T)), estimated from some of them."""
    some = weight[::_ESTIMATED]
    lost, all_of_it = (float((part @ hessian).mul_(part).sum()) for part in (some - dequantized[::_ESTIMATED], some))
    return (lost / all_of_it) ** 0.5 if all_of_it > 0 else 0.0


@contextmanager
def _passing(module: Any, name: str) -> Iterator[None]:
    """Within the block a module returns what its last linear layer would get."""
    with _replaced(module, {name: nn.Identity()}):
        yield


@contextmanager
def _replaced(module: nn.Module, places: dict[str, nn.Module]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in places}
    for name, other in places.items():
        setattr(module, name, other)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)


@contextmanager
def _replaced_forward(layers: nn.ModuleList, forward: Callable[..., Tensor]) -> Iterator[None]:
    for layer in layers:
        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
