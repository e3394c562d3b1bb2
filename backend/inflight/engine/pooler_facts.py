"""The vectors that a checkpoint can yield; the engine tells the frontend.  No torch."""

from __future__ import annotations

import msgspec

__all__ = ["PoolerFacts"]


class PoolerFacts(msgspec.Struct, array_like=True, frozen=True):
    """The vectors that a checkpoint can yield.

    Attributes:
        tasks: of "embed", "score" and "classify"; empty: none, for the reason `lacking`.
        kind: see `Pooling`.
        size: numbers of an embedding.
        normalizes: whether an embedding is normalised unless its request decides.
        matryoshka: sizes to which an embedding can be cut: None: no other; []: any up to `size`.
        labels: of the classes.
        pairs: how a score is computed: from two embeddings ("cosine"), or from one prompt ("template", "tokenizer").
        template: of "template": text before, in and after the pair; tokens of each are computed apart.
        prompts: texts that the checkpoint puts before those to embed, by name.
        generates: it has a language model head.
        lowers: texts are in lower case before they are tokenised.
    """

    tasks: list[str] = []
    kind: str = "last"
    size: int = 0
    normalizes: bool = True
    matryoshka: list[int] | None = None
    labels: list[str] = []
    pairs: str = "cosine"
    template: list[str] = []
    prompts: dict[str, str] = {}
    generates: bool = True
    lacking: str = ""
    lowers: bool = False
