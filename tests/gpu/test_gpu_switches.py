"""The whole engine on a GPU with the switches of `kernel_config`; skipped without one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens

from inflight.engine.sampling_params import SamplingParams

SHAPES = sized([(1, 30), (7, 40), (40, 16), (130, 12)], [(3, 3), (20, 2)])  # prompt, output tokens
LIMITS: dict[str, Any] = sized({}, dict(max_model_len=64, max_num_batched_tokens=16, check_on_load=False))
HAS_PDL = torch.cuda.get_device_capability() >= (9, 0)
PROMPTS = [random.Random(length).choices(range(VOCAB), k=length) for length, _ in SHAPES]


def generated(path: str, **options: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in SHAPES]
    options = {"device": "cuda", "block_size": 16, "max_num_seqs": sized(4, 2), **LIMITS, **options}
    deltas = run(make_core(path, **options), PROMPTS, params, stagger=2)
    return [tokens(deltas[number, 0]) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("switches", [["split_k"], ["launch_pdl"], ["split_k", "launch_pdl"]], ids="+".join)
def test_greedy_output_equals_generate(switches: list[str], enforce_eager: bool, tmp_path: Path) -> None:
    """float32; the down projection has inputs enough to be split, and steps have up to four tokens."""
    if "launch_pdl" in switches and not HAS_PDL:
        pytest.skip("the card has no programmatic dependent launch")
    path = make_checkpoint("llama", tmp_path, intermediate_size=sized(2048, 1024), num_hidden_layers=sized(2, 1))
    kernels = dict.fromkeys(switches, True)
    got = generated(path, max_num_batched_tokens=50, kernel_config=kernels, enforce_eager=enforce_eager)
    assert got == greedy_reference(path, PROMPTS, [count for _, count in SHAPES])


def test_whole_prompts_by_varlen_attn_pass_the_check_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path, head_dim=64)
    out = generated(path, dtype="bfloat16", kernel_config={"varlen_attention": True})
    assert [len(ids) for ids in out] == [count for _, count in SHAPES]
    assert not [line for line in caplog.messages if "varlen_attention" in line]
