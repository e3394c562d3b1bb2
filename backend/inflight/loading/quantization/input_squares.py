"""How large the inputs of a model's linear layers are, for formats that weigh errors by them.

An error in a weight costs its square times the mean square of its input, and trained models have a few inputs that are
much larger than the others.  Some random tokens show which: no text is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.hf import IMPLEMENTATION
from inflight.load_phases import enter_phase
from inflight.loading.quantization.coded_linear import num_weights
from inflight.loading.quantization.in_float32 import InFloat32, can_run_in_float32

__all__ = ["mean_squares"]

_log = logging.getLogger(__name__)

_SEQUENCES, _LENGTH = 4, 32
# Tokens times weights, which bound the time; the fewest tokens that tell something; and the weights above which even
# these take too long.
_PRODUCTS, _FEWEST = 128_000_000_000, 16
_MOST_WEIGHTS = 16_000_000_000
# Part of their mean that is added to all: what random tokens leave at zero, text may not.
_FLOOR = 1e-4


@torch.inference_mode()
def mean_squares(model: nn.Module, names: Collection[str], text_config: Any) -> dict[str, Tensor]:
    """Mean squares of the inputs, float32 [K], of the linear layers `names`; their mean is 1.

    Random tokens run through `model`, which is on a CPU, with transformers' own attention, in float32, on one thread,
    so that the result has the same bits each time.  The first token of a sequence counts as any other, because all
    tokens read its keys and values.  Trained models attend to it where there is nothing to attend to, and its input of
    one layer of SmolLM2-135M has 400,000 times the square of the others'.  Without it bench/quantization.py finds a
    perplexity of 13.98 instead of 13.40 (`shuffled`), with at most 32 times the median square of a token 13.45.

    Layers without a finite result are left out, such as an expert that saw no token; so are layers behind a failure of
    the model's code, and all of a model of more than 16 billion weights or with some on a GPU already.

    Args:
        names: paths in `model`.
        text_config: the model's.
    """
    if not names:
        return {}
    count = num_weights(model)
    if count > _MOST_WEIGHTS:
        _log.warning(
            "inputs of linear layers are not measured, so errors in all weights count the same: the model has %.0f "
            "billion weights, and measuring is for at most %.0f billion",
            count / 1e9,
            _MOST_WEIGHTS / 1e9,
        )
        return {}
    if away := next((x.device for x in (*model.parameters(), *model.buffers()) if x.device.type != "cpu"), None):
        _log.warning(
            "inputs of linear layers are not measured, so errors in all weights count the same: others are on %s", away
        )
        return {}
    enter_phase("measuring inputs")
    token_ids = _random_tokens(count, text_config)
    sums: dict[str, Tensor] = {}

    def add(name: str, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        squares = x.flatten(0, -2).float().square().sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    layers = {name: model.get_submodule(name) for name in names}
    hooks = [layer.register_forward_pre_hook(partial(add, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        _run(model, _part_with(model, layers.values()), token_ids)
    except Exception as error:  # whatever the model's code raises: weights can be quantized without
        # The check at load runs the model in the same way, and says what it means.
        missing = len(names) - len(sums)
        _log.warning(
            "inputs of %d of %d linear layers cannot be measured: %s: %s",
            missing,
            len(names),
            type(error).__name__,
            error,
        )
    finally:
        for hook in hooks:
            hook.remove()
    means = {name: squares / squares.mean() + _FLOOR for name, squares in sums.items()}
    return {name: mean for name, mean in means.items() if bool(mean.isfinite().all())}


def _random_tokens(weights: int, text_config: Any) -> Tensor:
    """int64 [sequences, length]: as many as their time allows, none beyond the model's positions."""
    tokens = max(_FEWEST, _PRODUCTS // max(1, weights))
    positions = getattr(text_config, "max_position_embeddings", None) or _LENGTH
    size = min(_SEQUENCES, max(1, tokens // _LENGTH)), min(_LENGTH, tokens, positions)
    return torch.randint(int(text_config.vocab_size), size, generator=torch.Generator().manual_seed(0))


def _part_with(model: Any, layers: Iterable[nn.Module]) -> nn.Module:
    """`model` without its head, if that has all of `layers`."""
    base: nn.Module = model.base_model
    within = set(base.modules())
    return base if all(layer in within for layer in layers) else model


def _run(model: nn.Module, part: nn.Module, token_ids: Tensor) -> None:
    positions = torch.arange(token_ids.shape[1])[None].expand_as(token_ids)
    in_float32: AbstractContextManager[Any] = InFloat32() if can_run_in_float32(model) else nullcontext()
    with _own_attention(model), _one_thread(), in_float32:
        part.eval()(input_ids=token_ids, position_ids=positions, use_cache=False)


@contextmanager
def _own_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def _one_thread() -> Any:
    """The order of additions in a product can depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
