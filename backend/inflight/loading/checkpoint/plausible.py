"""Sizes in config.json that the checkpoint's files contradict, before anything of these sizes is made.

transformers makes modules and weights as config.json says, and only then compares them with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn

from inflight.loading.load_errors import LoadError

__all__ = ["check_sizes"]

_MOST_A_NUMBER = 8  # weights in a number that is stored: codes of four bits in int32
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_sizes(
    where: str, text_config: Any, shapes: Mapping[str, Sequence[int]], make_model: Callable[[], nn.Module]
) -> None:
    """
    Args:
        where: begins messages.
        shapes: of the tensors in the files.
        make_model: the model that config.json describes, without memory; is called only if a size is suspicious.

    Raises:
        LoadError: the model has more layers than there are tensors, more experts than there are rows for them, or
            more weights than the files can hold.  Of sizes whose product `_estimate` does not know, such as the ranks
            of latent attention, each must be suspicious by itself.
    """
    layers = _size(text_config, "num_hidden_layers")
    if layers > len(shapes):
        raise LoadError(
            f"{where}: its config.json says num_hidden_layers={layers}, and its files have {len(shapes)} tensors; "
            "download it again"
        )
    room = _MOST_A_NUMBER * sum(map(prod, shapes.values()))
    for name in _EXPERTS:
        experts = _size(text_config, name)
        if experts * _size(text_config, "hidden_size") > room:
            raise LoadError(
                f"{where}: its config.json says {name}={experts}, and its files have {room // _MOST_A_NUMBER} numbers; "
                "download it again"
            )
    if _estimate(text_config) <= room:
        return
    model = make_model()
    parameters = dict(model.named_parameters())
    if sum(parameter.numel() for parameter in parameters.values()) <= room:
        return
    name, largest = max(parameters.items(), key=lambda entry: entry[1].numel())
    prefix = f"{model.base_model_prefix}."
    stored = {name.removeprefix(prefix): shape for name, shape in shapes.items()}  # files are saved with it or without
    found = stored.get(name.removeprefix(prefix))
    if found is not None and list(found) != list(largest.shape):
        why = f": {name} has shape {list(found)}, not {list(largest.shape)}"
    else:
        why = f", by which {name} has shape {list(largest.shape)}: its files have {room // _MOST_A_NUMBER} numbers"
    raise LoadError(f"{where}: its weights do not match its config.json{why}")


def _estimate(text_config: Any) -> int:
    """At least the weights of the largest layer, times the layers; larger than they are for some models."""
    hidden, head_dim = _size(text_config, "hidden_size"), _size(text_config, "head_dim")
    experts = max(_size(text_config, name) for name in _EXPERTS)
    width = max(_size(text_config, "intermediate_size"), _size(text_config, "moe_intermediate_size"))
    heads = max(_size(text_config, "num_attention_heads"), _size(text_config, "num_key_value_heads"))
    layer = hidden * max(heads * head_dim, width, experts * width)
    return max(layer * _size(text_config, "num_hidden_layers"), hidden * max(_integers(text_config.to_dict())))


def _integers(value: Any) -> Iterator[int]:
    """All numbers of a configuration, and 0: tables are as long as some of them, whatever their names."""
    yield 0
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _integers(part)
    elif isinstance(value, list):
        for part in value:
            yield from _integers(part)


def _size(text_config: Any, name: str) -> int:
    """0 if the architecture has no such size, or one for each layer."""
    found = getattr(text_config, name, None)
    return found if isinstance(found, int) else 0
