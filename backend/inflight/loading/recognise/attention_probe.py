"""The probe: what each layer of a model asks of attention, and whether the model heeds `logits_to_keep`.

A forward pass runs under an attention implementation that only records.  A layer says what it needs in two ways: by
the arguments of its attention call and by its mask.  transformers builds masks from functions of indices; the probe
reads those functions at a model's full length, and gives the model a tensor that names the mask in place of its values.
Whatever a layer hands to its attention is then one of these names, or the layer has computed a mask of its own, which
paging would drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from inflight.attention.base import LayerSpec
from inflight.attention.hf import IMPLEMENTATION
from inflight.loading.load_errors import LoadError, in_models_code

__all__ = ["IGNORED_ARGUMENTS", "Probed", "probe"]

_NUM_TOKENS, _MIDDLE = 3, 1
_KINDS = ("full_attention", "attention", "sliding_attention", "chunked_attention")
_IMPLEMENTATION = "inflight_probe"

# Keyword arguments that do not affect a forward pass without gradients, padding and transformers' cache.
IGNORED_ARGUMENTS = {
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "training",
    "use_cache",
}


@dataclass(frozen=True)
class Probed:
    """The results of the probe.

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
    model.set_attn_implementation(_IMPLEMENTATION)  # type: ignore[operator]
    if model.config._attn_implementation != _IMPLEMENTATION:  # type: ignore[union-attr]
        raise LoadError(
            f"model type {kind!r} is not supported: its attention does not use transformers' AttentionInterface"
        )
    try:
        with _record_calls(max_model_len) as found:
            whole = model(**_inputs(device)).logits
        with _record_calls(max_model_len):
            kept = model(**_inputs(device), logits_to_keep=torch.tensor([_MIDDLE], device=device)).logits
    except _UnsupportedAttention as error:
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


class _UnsupportedAttention(ValueError):
    """A layer needs a feature that paged attention does not support; the message names it."""


@dataclass
class _Recording:
    """The attention calls of a forward pass.

    Attributes:
        max_model_len: positions at which masks are read.
        layers: (attention module, spec) of each call, in order.
        windows: sliding window of each mask that was built, None for a full one; its place is its name.
    """

    max_model_len: int
    layers: list[tuple[nn.Module, LayerSpec]] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    def name_of(self, mask: Callable[..., Any], device: torch.device) -> int:
        self.windows.append(_window_of(mask, self.max_model_len, device))
        return len(self.windows) - 1

    def window_of(self, mask: Tensor, module: str) -> int | None:
        """The window of a named mask."""
        name = mask.flatten()[0].item()
        if not bool((mask == name).all()) or name not in range(len(self.windows)):
            raise _UnsupportedAttention(
                f"{module} computes an attention mask or bias of its own, which paged attention does not support"
            )
        return self.windows[int(name)]


_recording: _Recording | None = None


@contextmanager
def _record_calls(max_model_len: int) -> Iterator[_Recording]:
    """Record the attention calls of models whose implementation is `_IMPLEMENTATION` within the block."""
    global _recording
    before, _recording = _recording, _Recording(max_model_len)
    try:
        yield _recording
    finally:
        _recording = before


def _current() -> _Recording:
    if _recording is None:
        raise RuntimeError("the probe's attention was called outside of a probe")
    return _recording


def _window_of(mask: Callable[..., Any], max_model_len: int, device: torch.device) -> int | None:
    """The window of a mask function at lengths up to `max_model_len`; None if each token attends to all before it.

    Raises:
        _UnsupportedAttention: the mask is something else.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(max_model_len, device=device)

    def visible(query: int) -> Tensor:
        row = torch.full_like(keys, query)
        found = mask(zero, zero, row, keys)
        return found.to(torch.bool).expand_as(keys) if isinstance(found, Tensor) else keys >= 0

    last = max_model_len - 1
    window = int(visible(last).sum())
    for query in sorted({0, 1, window - 1, window, last // 2, max(0, last - 1), last} & set(range(max_model_len))):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(visible(query), expected):
            raise _UnsupportedAttention(
                f"the token at position {query} of {max_model_len} attends to others than those before it within a "
                "window (a chunked, bidirectional or block mask), which paged attention does not support at "
                "this max_model_len"
            )
    return None if window == max_model_len else window


def _named_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask [B, 1, q_length, kv_length] whose values are its name."""
    name = _current().name_of(mask_function, torch.device(device))
    return torch.full((batch_size, 1, q_length, kv_length), name, dtype=torch.float32, device=device)


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    recording, name = _current(), type(module).__name__
    if attention_mask is not None:
        sliding_window = recording.window_of(attention_mask, name)
    elif kwargs.get("is_causal") is False:
        raise _UnsupportedAttention(f"{name} is not causal (is_causal=False); only decoders are supported")
    unknown = sorted(key for key, value in kwargs.items() if value is not None and key not in IGNORED_ARGUMENTS)
    if unknown:
        raise _UnsupportedAttention(f"{name} passes {', '.join(unknown)} to its attention, which is not supported")
    if query.shape[2] != key.shape[2]:
        raise _UnsupportedAttention(f"{name} attends to another sequence (cross-attention), which is not supported")
    spec = LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_head_size=key.shape[3],
        value_head_size=value.shape[3],
        scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )
    recording.layers.append((module, spec))
    to_itself = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return to_itself.transpose(1, 2).contiguous(), None


AttentionInterface.register(_IMPLEMENTATION, _record)
AttentionMaskInterface.register(_IMPLEMENTATION, _named_mask)
