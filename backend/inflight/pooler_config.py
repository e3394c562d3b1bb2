"""`pooler_config` and `hf_overrides` of a `model.json`: what no file says about vectors.  No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["HfOverrides", "PoolerConfig"]

_Kind = Literal["LAST", "MEAN", "CLS"]
_Size = Annotated[int, Meta(ge=1, le=2**20)]


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hidden states become a vector, where it is not what the checkpoint's modules.json says; keys are vLLM's.

    Attributes:
        pooling_type: "LAST", "MEAN" or "CLS" (the first token).
        normalize: whether embeddings are normalised unless a request decides.
        score_template: "qwen3", or three texts: what precedes a pair, the pair with {instruction}, {query} and
            {document}, and what follows it.
    """

    pooling_type: _Kind | None = None
    normalize: bool | None = None
    score_template: str | list[str] | None = None

    def __post_init__(self) -> None:
        given = self.score_template
        if given not in (None, "qwen3") and (isinstance(given, str) or given is None or len(given) != 3):
            raise ValueError(f'score_template={given!r}: must be "qwen3" or three texts')
        if isinstance(given, list) and not all(name in given[1] for name in ("{query}", "{document}")):
            raise ValueError(f"score_template={given!r}: the second text must contain {{query}} and {{document}}")


class HfOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of config.json that vLLM's users override for vectors.

    Attributes:
        architectures: has no effect: the tokens or the weights of the head say what it is.
        classifier_from_token: two tokens, no and yes: a score is the probability of the second one beside the first.
        is_original_qwen3_reranker: pairs are formatted as Qwen3-Reranker's.
        method: of `classifier_from_token`; has no effect.
        is_matryoshka: embeddings can be cut to any size.
        matryoshka_dimensions: embeddings can be cut to these sizes.
    """

    architectures: list[str] = []
    classifier_from_token: list[str] | None = None
    is_original_qwen3_reranker: bool = False
    method: Literal["from_2_way_softmax", "no_post_processing"] | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[_Size] | None = None

    def __post_init__(self) -> None:
        if self.classifier_from_token is not None and len(self.classifier_from_token) != 2:
            raise ValueError(f"classifier_from_token={self.classifier_from_token}: must be two tokens, no and yes")
