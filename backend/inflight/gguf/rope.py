"""Frequencies of the rotary embedding, from a GGUF file: `rope_parameters` as transformers has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from inflight.gguf.header import GgufError
from inflight.gguf.values import Values

__all__ = ["rope_parameters"]

_WAY_OUT = "use the model's Hugging Face checkpoint"
# Llama 3.1's and 3.2's, which the file contains as divisors of its frequencies alone.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def rope_parameters(values: Values, num_dimensions: int) -> dict[str, Any]:
    """
    Args:
        num_dimensions: of a head that are rotated.

    Raises:
        GgufError: they are scaled in a way that is not served.
    """
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": values.number("rope.freq_base", 10000.0)}
    long, short = (values.factors(f"rope_factors_{kind}.weight", num_dimensions // 2) for kind in ("long", "short"))
    if long is not None and short is not None:
        return plain | _longrope(values, long, short)
    divisors = values.factors("rope_freqs.weight", num_dimensions // 2)
    if divisors is not None:
        return plain | _llama3(divisors, plain["rope_theta"], num_dimensions)
    kind = values.text("rope.scaling.type") or "none"
    if kind == "none":
        return plain
    factor = values.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return plain | _yarn(values, factor)
    raise GgufError(f"{values.architecture}.rope.scaling.type is {kind!r:.40} (served: linear, yarn); {_WAY_OUT}")


def _longrope(values: Values, long: list[float], short: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
    }
    if values.has("rope.scaling.attn_factor"):
        found["attention_factor"] = values.number("rope.scaling.attn_factor")
    return found


def _yarn(values: Values, factor: float) -> dict[str, Any]:
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if values.number(name, 1.0) != 1.0:
            raise GgufError(f"{values.architecture}.{name} is {values.number(name)}, not 1; {_WAY_OUT}")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if values.has(f"rope.scaling.yarn_{name}"):
            found[name] = values.number(f"rope.scaling.yarn_{name}")
    return found


def _llama3(divisors: list[float], theta: float, num_dimensions: int) -> dict[str, Any]:
    """Llama 3's scaling has four parameters, and the file contains what follows from them."""
    factor = round(max(divisors), 4)
    expected = [_divisor(2 * math.pi * theta ** (k / num_dimensions), factor) for k in range(0, num_dimensions, 2)]
    if not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise GgufError(f"rope_freqs.weight contains other factors than those of Llama 3; {_WAY_OUT}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _divisor(wavelength: float, factor: float) -> float:
    if wavelength < _ORIGINAL / _HIGH:
        return 1.0
    if wavelength > _ORIGINAL / _LOW:
        return factor
    smooth = (_ORIGINAL / wavelength - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)
