"""On a CPU a token has the same logits to the last bit alone and in any batch, by each forward pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from nightly import nightly_but
from torch import Tensor, nn

from inflight.attention.base import forward_context
from inflight.config import EngineConfig
from inflight.device.batch_state import BatchState
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.kernels.cpu import library
from inflight.loading.forward.packed_experts import pack_others
from inflight.loading.loader import LoadedModel, load

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

BLOCKS, BLOCK = 16, 16
# Their experts or gates use functions of torch whose last bit depends on the place in a batch (docs/models.md).
EXCEPT = {"llama4_text", "jetmoe", "afmoe"}
IN_SHORT = ("gemma2", "gpt2", "gpt_oss", "granite", "llama", "mixtral", "opt", "phi", "qwen3_moe")


def loaded(model_type: str, folder: Path, **options: Any) -> LoadedModel:
    torch.set_num_threads(1)
    wide = {} if model_type in ("gpt2", "opt", "jetmoe") else dict(hidden_size=128, intermediate_size=352)
    path = make_checkpoint(model_type, folder, **wide)
    values = dict(model=path, device="cpu", kv_cache_memory="32MiB", block_size=BLOCK, **options)
    return load(EngineConfig.from_dict(values))


def row(slot: int, token_ids: list[int]) -> NewRow:
    blocks = list(range(slot * BLOCKS, (slot + 1) * BLOCKS))
    ids = np.array(token_ids, dtype=np.int32).tobytes()
    return NewRow(slot, slot, 0, ids, len(token_ids), blocks, SamplingParams(), 0)


@torch.inference_mode()
def logits(model: LoadedModel, sequences: list[list[int]], rng: random.Random | None) -> list[Tensor]:
    """Of each sequence, computed together in chunks of random sizes; or each alone and at once."""
    if rng is None:
        return [part for sequence in sequences for part in logits(model, [sequence], random.Random(-1))]
    state = BatchState(len(sequences), BLOCKS * BLOCK, BLOCK, torch.device("cpu"))
    rows = [row(slot, sequence) for slot, sequence in enumerate(sequences)]
    done, parts = [0] * len(sequences), [[] for _ in sequences]  # type: ignore[var-annotated]
    while slots := [slot for slot, sequence in enumerate(sequences) if done[slot] < len(sequence)]:
        left = {slot: len(sequences[slot]) - done[slot] for slot in slots}
        counts = [left[slot] if len(sequences) == 1 else min(rng.choice([1, 3, 7, 16]), left[slot]) for slot in slots]
        computed, samples = [done[slot] for slot in slots], [False] * len(slots)
        out = SchedulerOutput(slots, counts, computed, samples, new_rows=rows, num_tokens=sum(counts))
        rows = []
        state.apply(out)
        state.fill_rows(out)
        inputs = state.step_inputs(out)
        with forward_context(inputs.metadata, model.backend):
            found = model.model(input_ids=state.input_ids(inputs), position_ids=inputs.positions, use_cache=False)
        for slot, count, part in zip(slots, counts, found.logits[0].split(counts)):
            parts[slot].append(part.clone())
            done[slot] += count
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("model_type", nightly_but(IN_SHORT, sorted(ARCHITECTURES.keys() - EXCEPT)))
def test_logits_do_not_depend_on_the_batch(model_type: str, dtype: str, tmp_path: Path) -> None:
    model = loaded(model_type, tmp_path, dtype=dtype)
    rng = random.Random(1)
    sequences = [[rng.randrange(VOCAB) for _ in range(length)] for length in (37, 5, 80, 23, 64)]
    for together, alone in zip(logits(model, sequences, rng), logits(model, sequences, None)):
        assert torch.equal(together, alone)


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "gpt_oss", "qwen3_moe"])
def test_what_is_packed_computes_the_same_and_is_undone_exactly(model_type: str, tmp_path: Path) -> None:
    model = loaded(model_type, tmp_path, dtype="float32", native_forward=False)
    module: nn.Module = model.model
    before = {name: value.clone() for name, value in module.state_dict().items()}
    sequences = [list(range(30)), list(range(50, 90))]
    expected = logits(model, sequences, None)
    undo = pack_others(module)
    assert undo is not None
    held = sum(value.numel() for value in module.state_dict().values())
    assert held < sum(value.numel() for value in before.values()), "the plain weights are freed"
    for found, right in zip(logits(model, sequences, None), expected):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    undo()
    after = module.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(*pair) for pair in zip(logits(model, sequences, None), expected))


def test_experts_of_transformers_5_17_do_not_say_whether_they_have_a_norm(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path, dtype="float32", native_forward=False)
    module: nn.Module = model.model
    expected = logits(model, [list(range(30))], None)
    for part in module.modules():
        part.__dict__.pop("has_post_expert_norm", None)
    assert pack_others(module) is not None
    torch.testing.assert_close(logits(model, [list(range(30))], None), expected, rtol=1e-4, atol=1e-4)
