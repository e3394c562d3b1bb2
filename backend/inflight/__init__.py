"""Inflight: continuous batching for Hugging Face language models on NVIDIA Triton.

`LLM`, `AsyncLLM`, `SamplingParams` and `grammar` are the in-process API, `ConfigError`, `LoadError`, `RequestError` and
`ChatTemplateError` what it raises; importing the package alone loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.config import ConfigError
    from inflight.frontend.chat.chat_messages import ChatTemplateError
    from inflight.frontend.errors import RequestError
    from inflight.frontend.request.structured_outputs import grammar
    from inflight.in_process.async_llm import AsyncLLM
    from inflight.in_process.llm import LLM
    from inflight.in_process.lora import LoRARequest
    from inflight.in_process.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
    from inflight.in_process.params import SamplingParams
    from inflight.in_process.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        RerankResult,
        ScoringRequestOutput,
    )
    from inflight.loading.load_errors import LoadError

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatTemplateError",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "LoadError",
    "Logprob",
    "PoolingParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "RerankResult",
    "SamplingParams",
    "ScoringRequestOutput",
    "__version__",
    "grammar",
]

__version__ = "0.1.0"

_MODULES = {
    "AsyncLLM": "inflight.in_process.async_llm",
    "ChatTemplateError": "inflight.frontend.chat.chat_messages",
    "ClassificationRequestOutput": "inflight.in_process.pooling_outputs",
    "CompletionOutput": "inflight.in_process.outputs",
    "ConfigError": "inflight.config",
    "EmbeddingRequestOutput": "inflight.in_process.pooling_outputs",
    "LLM": "inflight.in_process.llm",
    "LoRARequest": "inflight.in_process.lora",
    "LoadError": "inflight.loading.load_errors",
    "Logprob": "inflight.in_process.outputs",
    "PoolingParams": "inflight.in_process.pooling_outputs",
    "RequestError": "inflight.frontend.errors",
    "RequestOutput": "inflight.in_process.outputs",
    "RequestOutputKind": "inflight.in_process.outputs",
    "RerankResult": "inflight.in_process.pooling_outputs",
    "SamplingParams": "inflight.in_process.params",
    "ScoringRequestOutput": "inflight.in_process.pooling_outputs",
    "grammar": "inflight.frontend.request.structured_outputs",
}
_BACKEND_EXTRA = {"huggingface_hub", "jinja2", "regex", "safetensors", "tokenizers", "torch", "transformers", "xxhash"}


def __getattr__(name: str) -> Any:
    """Import public names on first use: the frontend process must not load torch.

    Raises:
        ImportError: the extra `backend` is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _BACKEND_EXTRA:
            raise
        raise ImportError(
            f"inflight.{name} needs {missing}, which is not installed: pip install 'triton-inflight[backend]'"
        ) from None
