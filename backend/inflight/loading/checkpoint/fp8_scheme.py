"""Reads a checkpoint's `quantization_config` for weights in fp8, and names what is not supported."""

from __future__ import annotations

from typing import Any

__all__ = ["block_size", "quantization", "unquantised_inputs", "unsupported"]

_FORMATS = ("float-quantized", "naive-quantized", "mixed-precision", "dense", None)
_PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
# Of weights, of inputs, of results: how numbers share scales; None means there are none.
_STRATEGIES: dict[str, tuple[str | None, ...]] = {
    "weights": ("tensor", "channel", "block"),
    "input_activations": ("tensor", "token", "group", None),
    "output_activations": ("tensor", None),
}


def quantization(hf_config: Any) -> dict[str, Any] | None:
    """The quantization_config of config.json, if it has one."""
    for part in (hf_config, hf_config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def unsupported(values: dict[str, Any]) -> str | None:
    """The unsupported part of a quantization_config, by name; None if all of it runs."""
    blocks = block_size(values)
    if blocks is not None and not (len(blocks) == 2 and all(isinstance(n, int) and n > 0 for n in blocks)):
        return f"the blocks of its weights are {blocks}, not numbers of rows and columns"
    if values["quant_method"] != "compressed-tensors":
        for key, allowed in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
            if values.get(key, allowed) != allowed:
                return f"its quantization_config has {key}={values[key]!r} (supported: {allowed!r})"
        return None
    if values.get("format") not in _FORMATS:
        names = ", ".join(repr(name) for name in _FORMATS if name)
        return f"it is compressed as format={values['format']!r} (supported: {names})"
    if (values.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are stored as sparse: format={values['sparsity_config']['format']!r}"
    if values.get("transform_config"):
        return "it has a transform_config, whose rotations of weights and inputs are not supported"
    for name, group in (values.get("config_groups") or {}).items():
        if reason := _unsupported_group(name, group):
            return reason
    return None


def _unsupported_group(name: str, group: Any) -> str | None:
    """The unsupported part of an entry of `config_groups`: its scheme, or a scheme's name with its targets."""
    if isinstance(group, list):
        return None if name in _PRESETS else f"its config group {name!r} is not one of {', '.join(_PRESETS)}"
    for key, strategies in _STRATEGIES.items():
        scheme = group.get(key)
        if scheme is None:
            continue
        bits, kind, strategy = scheme.get("num_bits", 8), scheme.get("type", "int"), scheme.get("strategy")
        if (bits, kind) != (8, "float") or not scheme.get("symmetric", True) or strategy not in strategies:
            return (
                f"the {key} of its config group {name!r} are {kind}{bits}, {strategy}"
                f"{'' if scheme.get('symmetric', True) else ', asymmetric'} (supported: float8, symmetric, "
                f"{' or '.join(filter(None, strategies))})"
            )
    return None


def unquantised_inputs(values: dict[str, Any]) -> str | None:
    """Why a checkpoint's products are not in fp8, although its weights are."""
    groups = (values.get("config_groups") or {}).values()
    if any(isinstance(group, dict) and group.get("input_activations") is None for group in groups):
        return "the checkpoint quantizes weights only"
    return None


def block_size(values: dict[str, Any]) -> list[int] | None:
    """Rows and columns of the blocks of a weight that share a scale."""
    if values.get("weight_block_size"):
        return list(values["weight_block_size"])
    for name, group in (values.get("config_groups") or {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if weights and weights.get("block_structure"):
            return list(weights["block_structure"])
        if name == "FP8_BLOCK":
            return [128, 128]
    return None
