"""Requests for a vector of their prompt (embedding, score, class probabilities) in place of text.  No torch.

Such a request has `max_tokens` 1: the row that computes the last prompt token yields the vector in place of a token,
and the token that the scheduler counts is void.
"""

from __future__ import annotations

import msgspec

__all__ = ["Pooling"]


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
