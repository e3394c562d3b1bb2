"""Requests for a vector of their prompt (embedding, score, class probabilities) in place of text.  No torch.

Such a request has `max_tokens` 1: the row that computes the last prompt token yields the vector in place of a token,
and the token that the scheduler counts is void.
"""

from __future__ import annotations

import msgspec

__all__ = ["PoolerFacts", "Pooling"]


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """The vector that a request asks for.

    Attributes:
        task: "embed", "score" or "classify".
        kind: of the checkpoint: "last", "mean" or "cls", which is the first token.
        activates: normalise an embedding; apply softmax or sigmoid to the logits of a score or of classes.
        dimensions: leading numbers of an embedding to keep; 0: all.
    """

    task: str
    kind: str = "last"
    activates: bool = True
    dimensions: int = 0


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
