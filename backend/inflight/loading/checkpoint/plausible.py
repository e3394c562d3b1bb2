"""Sizes in config.json that the checkpoint's files contradict, before anything of these sizes is made.

transformers makes modules and weights as config.json says, and only then compares them with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn

from inflight.loading.load_errors import LoadError

__all__ = ["check_sizes"]

_MOST_A_NUMBER = 8  # weights in a number that is stored: codes of four bits in int32


def check_sizes(
    where: str, text_config: Any, shapes: Mapping[str, Sequence[int]], make_model: Callable[[], nn.Module]
) -> None:
    """
    Args:
        where: begins messages.
        shapes: of the tensors in the files.
        make_model: the model that config.json describes, without memory; is called only if a size is suspicious.

    Raises:
        LoadError: the model has more layers than there are tensors, or a weight that is larger than all of them.
    """
    layers = _size(text_config, "num_hidden_layers")
    if layers > len(shapes):
        raise LoadError(
            f"{where}: its config.json says num_hidden_layers={layers}, and its files have {len(shapes)} tensors; "
            "download it again"
        )
    hidden = _size(text_config, "hidden_size")
    heads = _size(text_config, "num_attention_heads") * _size(text_config, "head_dim")
    largest = hidden * max(heads, _size(text_config, "intermediate_size"), _size(text_config, "vocab_size"))
    if largest <= _MOST_A_NUMBER * sum(map(prod, shapes.values())):
        return
    for name, parameter in make_model().named_parameters():
        found = shapes.get(name)
        if found is not None and list(found) != list(parameter.shape):
            raise LoadError(
                f"{where}: its weights do not match its config.json: {name} has shape {list(found)}, not "
                f"{list(parameter.shape)}"
            )


def _size(text_config: Any, name: str) -> int:
    """0 if the architecture has no such size, or one for each layer."""
    found = getattr(text_config, name, None)
    return found if isinstance(found, int) else 0
