"""Requests that begin alike, in an engine: tokens and log probabilities are those of separate prefixes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offline
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint

from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

PREFIX, REQUESTS = 1040, 4


def prompts() -> list[list[int]]:
    """All begin alike; the third and fourth go on alike for another 530 tokens."""
    generator = torch.Generator().manual_seed(3)

    def fresh(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prefix, branch = fresh(PREFIX), fresh(530)
    return [prefix + fresh(3), prefix + fresh(20), prefix + branch + fresh(5), prefix + branch + fresh(2)]


def generated(core: EngineCore, salts: list[str]) -> list[Any]:
    """Tokens and log probabilities of each request; its samples one after the other."""
    params = [
        SamplingParams(max_tokens=7, temperature=0.0 if number else 0.8, seed=1, n=3 - number % 2, logprobs=1)
        for number in range(REQUESTS)
    ]
    found: dict[tuple[int, int], list[Any]] = {}
    for number, (prompt, sampling, salt) in enumerate(zip(prompts(), params, salts)):
        assert core.add_request(AddRequest(number, prompt, sampling, cache_salt=salt)) is None
    while core.has_work:
        for delta in core.step().deltas:
            found.setdefault((delta.request_id, delta.index), []).append((delta.token_ids, delta.logprobs))
    return sorted(found.items())


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}], ids=["plain", "int8"])
def test_outputs_are_those_of_separate_prefixes(
    model_type: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"n_positions": 2048} if model_type == "gpt2" else {}
    path = make_checkpoint(model_type, tmp_path, max_position_embeddings=2048, **size)
    core = offline.make_core(path, kv_cache_memory="32MiB", max_model_len=2048, check_on_load=False, **options)
    together = generated(core, [""] * REQUESTS)
    assert core.pool.num_prefix_hits > 3 * PREFIX // 16 * 16
    assert together == generated(core, [str(number) for number in range(REQUESTS)])
