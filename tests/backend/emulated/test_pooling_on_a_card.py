"""Vectors on an emulated card are those of the CPU, and no launch waits for the card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from card_rig import card_core, functions_as_kernels, num_replays, without_waits
from checkpoints import make_checkpoint
from emulated_card import Card, emulated_card
from every_kind import prompt_of
from offline import make_core
from pooled import pooled, vectors_of

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams

LIMITS: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> Any:
    """Vectors and tokens of `mixture`."""
    return vectors_of(make_core(checkpoint, **LIMITS), mixture())


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


@pytest.fixture
def card() -> Any:
    with emulated_card() as made:
        yield made


def mixture() -> list[AddRequest]:
    params = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
    chats = [AddRequest(i, prompt_of(i, 5 + i), params) for i in range(4)]
    lengths = [1, 17, 40, 41, 63, 64]
    asked = [pooled(10 + i, prompt_of(i, n), ("last", "mean", "cls")[i % 3]) for i, n in enumerate(lengths * 2)]
    return [*chats[:2], *asked[:6], *chats[2:], *asked[6:]]


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"max_cudagraph_capture_size": 8}])
def test_vectors_beside_chats(on_the_cpu: Any, checkpoint: str, card: Card, options: dict[str, Any]) -> None:
    expected, tokens = on_the_cpu
    core = without_waits(card_core(checkpoint, **options))
    found, others = vectors_of(core, mixture())
    assert others == tokens and found.keys() == expected.keys()
    for request_id, vector in expected.items():
        np.testing.assert_allclose(found[request_id], vector, rtol=1e-4, atol=1e-5)
    if "max_cudagraph_capture_size" in options:
        assert sum(num_replays(core).values()) > 0, "chats without vectors beside them still run by graphs"


def test_a_vector_that_is_not_finite_fails_alone(checkpoint: str, card: Card) -> None:
    core = card_core(checkpoint)
    pooler = core.runner.pooling._pooler  # type: ignore[attr-defined]

    class Broken:
        facts = pooler.facts

        def __call__(self, hidden: Any, pooling: Any) -> Any:
            return pooler(hidden, pooling) / (0 if pooling.dimensions else 1)

    core.runner.pooling._pooler = Broken()  # type: ignore[attr-defined]
    asked = [pooled(1, prompt_of(1, 9), dimensions=3), pooled(2, prompt_of(2, 9)), pooled(3, [5], task="classify")]
    for message in asked:
        assert core.add_request(message) is None
    failed, given = [], []
    while core.has_work:
        message = core.step()
        failed += [each.request_id for each in message.failed]
        given += [delta.request_id for delta in message.deltas if delta.pooled]
    assert (sorted(failed), given) == ([1, 3], [2])
