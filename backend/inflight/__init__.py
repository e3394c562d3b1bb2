"""Inflight: continuous batching for Hugging Face language models on NVIDIA Triton.

`LLM` and `SamplingParams` are the in-process API; importing the package alone loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.engine.sampling_params import SamplingParams
    from inflight.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOMES = {"LLM": "inflight.llm", "SamplingParams": "inflight.engine.sampling_params"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: the frontend process must not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
