"""Bodies of requests for vectors: embeddings, scores, rankings and classes."""

from __future__ import annotations

from typing import Any, ClassVar

from inflight_gateway.bodies import Body
from inflight_gateway.errors import invalid
from inflight_gateway.translations import Say, Translation

__all__ = ["ClassifyBody", "EmbeddingBody", "PooledBody", "RerankBody", "ScoreBody"]


def _older(key: str) -> Translation:
    """A name of `use_activation` in vLLM's older versions."""

    def translate(body: dict[str, Any], value: Any, say: Say) -> None:
        if body.setdefault("use_activation", value) != value:
            raise invalid(f"{key} and use_activation contradict each other; leave out one of the two", key)

    return translate


class PooledBody(Body, kw_only=True):
    """The common keys, under vLLM's names."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mm_processor_kwargs": (None,),
        "padding": (None, "do_not_pad"),
        "stream": (None, False),
    }
    TRANSLATED: ClassVar[dict[str, Translation]] = {"activation": _older("activation"), "softmax": _older("softmax")}

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class InputBody(PooledBody, kw_only=True):
    """`input`: a text, token ids, or a list of either; or `messages`: a chat, which is one input."""

    input: Any = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(InputBody, kw_only=True):
    """A request for embeddings."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **PooledBody.UNSUPPORTED,
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
    }
    TRANSLATED: ClassVar[dict[str, Translation]] = {"normalize": _older("normalize")}

    dimensions: int | None = None
    encoding_format: str | None = None
    instruction: str | None = None


class ClassifyBody(InputBody, kw_only=True):
    """A request for classes."""


class ScoreBody(PooledBody, kw_only=True):
    """A request for the scores of pairs: one text and one or several others, or as many of both."""

    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    instruction: str | None = None


class RerankBody(PooledBody, kw_only=True):
    """A request for the order of documents, in the form of Jina, Cohere and vLLM."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **PooledBody.UNSUPPORTED,
        "rank_fields": (None,),
        "max_chunks_per_doc": (None,),
        "return_embeddings": (None, False),
    }

    query: Any
    documents: Any
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
