"""How large the inputs of a model's linear layers are, for formats that weigh errors by them.

An error in a weight costs its square times the mean square of its input, and trained models have a few inputs that are
much larger than the others.  Some random tokens show which: no text is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.hf import IMPLEMENTATION
from inflight.loading.quantization.in_float32 import InFloat32, can_run_in_float32

__all__ = ["mean_squares"]

_log = logging.getLogger(__name__)

_SEQUENCES, _LENGTH = 4, 32
# Part of their mean that is added to all: what random tokens leave at zero, text may not.
_FLOOR = 1e-4


@torch.inference_mode()
def mean_squares(model: nn.Module, names: Collection[str], vocab_size: int) -> dict[str, Tensor]:
    """Mean squares of the inputs, float32 [K], of the linear layers `names`; their mean is 1.

    Random tokens run through `model`, which is on a CPU, with transformers' own attention, in float32, on one thread,
    so that the result has the same bits each time.  Layers without a finite result are left out, such as an expert that
    saw no token.

    Args:
        names: paths in `model`.
    """
    if not names:
        return {}
    sums: dict[str, Tensor] = {}

    def add(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].flatten(0, -2).float().square().sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(add, name)) for name in names]
    try:
        _run(model, vocab_size)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        # The check at load runs the model in the same way, and says what it means.
        _log.warning("inputs of linear layers cannot be measured: %s: %s", type(error).__name__, error)
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    means = {name: squares / squares.mean() + _FLOOR for name, squares in sums.items()}
    return {name: mean for name, mean in means.items() if bool(mean.isfinite().all())}


def _run(model: nn.Module, vocab_size: int) -> None:
    token_ids = torch.randint(vocab_size, (_SEQUENCES, _LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(_LENGTH)[None].expand_as(token_ids)
    in_float32: AbstractContextManager[Any] = InFloat32() if can_run_in_float32(model) else nullcontext()
    with _own_attention(model), _one_thread(), in_float32:
        model.eval()(input_ids=token_ids, position_ids=positions, use_cache=False)


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
