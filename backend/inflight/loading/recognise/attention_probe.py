"""The probe forward pass: what each layer's attention requires, and whether the model heeds `logits_to_keep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.base import LayerSpec
from inflight.attention.hf import IMPLEMENTATION
from inflight.attention.probing import PROBE, UnsupportedAttention, probing
from inflight.loading.errors import LoadError, in_models_code

__all__ = ["Probed", "probe"]

_NUM_TOKENS, _MIDDLE = 3, 1
_KINDS = ("full_attention", "attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class Probed:
    """What the probe found.

    Attributes:
        layers: (attention module, spec) in order.
        keeps_logits: whether the model computes the logits that `logits_to_keep` names, and no others.
    """

    layers: list[tuple[nn.Module, LayerSpec]]
    keeps_logits: bool


@torch.inference_mode()
def probe(model: nn.Module, text_config: Any, max_model_len: int, device: torch.device) -> Probed:
    """Run a few tokens through the model and record each layer's attention.

    Raises:
        LoadError: the architecture is not supported, by name.
    """
    kind = text_config.model_type
    model.set_attn_implementation(PROBE)  # type: ignore[operator]
    if model.config._attn_implementation != PROBE:  # type: ignore[union-attr]
        raise LoadError(
            f"model type {kind!r} is not supported: its attention does not use transformers' AttentionInterface"
        )
    try:
        with probing(max_model_len) as found:
            whole = model(**_inputs(device)).logits
        with probing(max_model_len):
            kept = model(**_inputs(device), logits_to_keep=torch.tensor([_MIDDLE], device=device)).logits
    except UnsupportedAttention as error:
        raise LoadError(f"model type {kind!r} is not supported: {error}") from error
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise LoadError(
            f"model type {kind!r} is not supported: it does not run on token ids and positions alone, without a "
            f"cache or a mask: {type(error).__name__}: {error}{in_models_code(error)}"
        ) from error
    finally:
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    _check_shape(kind, whole, text_config.vocab_size)
    _check_finite(kind, whole)
    _check_layers(text_config, found.layers)
    return Probed(found.layers, _keeps_logits(kind, kept, whole))


def _inputs(device: torch.device) -> dict[str, Any]:
    tokens = torch.arange(_NUM_TOKENS, device=device)[None]
    return dict(input_ids=tokens, position_ids=tokens, use_cache=False)


def _check_shape(kind: str, logits: Tensor, vocab_size: int) -> None:
    if list(logits.shape) != [1, _NUM_TOKENS, vocab_size]:
        raise LoadError(
            f"model type {kind!r} is not supported: its logits have shape {list(logits.shape)} for {_NUM_TOKENS} "
            f"tokens and a vocabulary of {vocab_size}"
        )


def _check_finite(kind: str, logits: Tensor) -> None:
    """NaN in the weights; -inf is how some models mask tokens."""
    if not logits.amax().isfinite():
        raise LoadError(
            f"the checkpoint (model type {kind!r}) cannot be served: its logits in {logits.dtype} are not finite (NaN "
            "or infinity), so its weights contain NaN or its arithmetic overflows; check the files, or set "
            '"dtype": "float32" in model.json'
        )


def _keeps_logits(kind: str, kept: Tensor, whole: Tensor) -> bool:
    """Whether `kept`, computed with `logits_to_keep`, is the middle row of `whole`; False if it is all of it."""
    if kept.shape == whole.shape:
        return False
    distances = (whole[0].float() - kept[0, :1].float()).norm(dim=-1)
    if kept.shape[1] != 1 or int(distances.argmin()) != _MIDDLE:
        raise LoadError(
            f"model type {kind!r} is not supported: with logits_to_keep=[{_MIDDLE}] it computes logits of shape "
            f"{list(kept.shape)}, and not those of token {_MIDDLE}"
        )
    return True


def _check_layers(text_config: Any, layers: list[tuple[nn.Module, LayerSpec]]) -> None:
    """Reject layers that keep a state of another kind than keys and values, or share it."""
    where = f"model type {text_config.model_type!r}"
    for index, kind in enumerate(getattr(text_config, "layer_types", None) or ()):
        if kind not in _KINDS:
            raise LoadError(
                f"{where}: layer {index} is of type {kind!r}; only full, sliding and chunked attention is supported"
            )
    expected = getattr(text_config, "num_hidden_layers", len(layers))
    if len(layers) != expected:
        raise LoadError(
            f"{where} is not supported: {len(layers)} attention calls for {expected} layers; each layer must call its "
            "attention exactly once through transformers' AttentionInterface (no state-space, convolution or shared "
            "layers)"
        )
    modules = [module for module, _ in layers]
    repeated = {type(module).__name__ for module in modules if sum(other is module for other in modules) > 1}
    if repeated:
        raise LoadError(
            f"{where} is not supported: {min(repeated)} is called more than once in a forward pass, and each call "
            "would need keys and values of its own"
        )
