"""Pooled requests of an engine core, and the vectors that transformers computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.frontend.request.pooled_request import void_params

__all__ = ["expected_vector", "pooled", "vectors_of"]


def pooled(request_id: int, prompt: list[int], kind: str = "last", **options: Any) -> AddRequest:
    pooling = Pooling(**{"task": "embed", "kind": kind, **options})
    return AddRequest(request_id, prompt, void_params(), attached=Attached(pooling=pooling))


def vectors_of(core: EngineCore, added: Sequence[AddRequest]) -> tuple[dict[int, np.ndarray], dict[int, list[int]]]:
    """The vectors of the pooled requests among these, and the tokens of the others, by id."""
    for message in added:
        refused = core.add_request(message)
        assert refused is None, refused
    vectors: dict[int, np.ndarray] = {}
    tokens: dict[int, list[int]] = {}
    while core.has_work:
        message = core.step()
        check_core(core)
        assert not message.failed, message.failed
        for delta in message.deltas:
            take(delta, vectors, tokens)
    return vectors, tokens


def take(delta: SequenceDelta, vectors: dict[int, np.ndarray], tokens: dict[int, list[int]]) -> None:
    if delta.pooled is None:
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        return
    assert (delta.token_ids, delta.finish_reason, delta.stop_token) == ([], "stop", None)
    assert delta.request_id not in vectors, "two vectors"
    vectors[delta.request_id] = np.frombuffer(delta.pooled, dtype=np.float32)


@torch.inference_mode()
def expected_vector(model: Any, prompt: list[int], kind: str = "last", normalizes: bool = True) -> np.ndarray:
    """By transformers, alone, in float32."""
    hidden = model.get_decoder()(torch.tensor([prompt]))[0][0]
    vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
    return (normalize(vector, dim=0) if normalizes else vector).numpy()
