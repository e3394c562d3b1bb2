"""Inflight's EngineCore on a GPU and transformers' generate() in static batches: output tokens per second.

Used by bench/gpu.py.  Requires the backend's dependencies: torch, triton, transformers, msgspec.  Both use the same
checkpoint (Qwen3 0.6B's shape, random weights) and requests: greedy, without EOS, all submitted at once.
Static batches take the requests in order, left-padded, and decode until the batch's longest output is complete;
only requested tokens count.  The two alternate; results are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from make_checkpoints import IDS, init_weights
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Workload:
    """Requests with lognormal prompt and output lengths, and how many run concurrently on each side."""

    requests: int
    prompt: int
    output: int
    max_num_seqs: int
    static_batch: int

    def draw(self, vocab_size: int) -> list[tuple[list[int], int]]:
        rng = np.random.default_rng(0)
        prompts = (rng.lognormal(np.log(self.prompt), 0.8, self.requests).astype(int)).clip(4, 4 * self.prompt)
        outputs = (rng.lognormal(np.log(self.output), 0.8, self.requests).astype(int)).clip(2, 4 * self.output)
        return [(rng.integers(3, vocab_size, n).tolist(), int(m)) for n, m in zip(prompts, outputs)]


def make_checkpoint(folder: str, device: str) -> Qwen3Config:
    """Qwen3 0.6B's shape on a GPU, a toy on a CPU."""
    small = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16)  # fmt: skip
    real = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                num_attention_heads=16, num_key_value_heads=8, head_dim=128)  # fmt: skip
    shape = real if device == "cuda" else small
    config = Qwen3Config(**shape, max_position_embeddings=8192, tie_word_embeddings=True, **IDS)
    model = Qwen3ForCausalLM(config)
    init_weights(model)
    model.generation_config = GenerationConfig(**IDS)
    model.to(torch.bfloat16).save_pretrained(folder)
    return config


def run_inflight(core: EngineCore, work: list[tuple[list[int], int]], first_id: int) -> float:
    """Seconds until all outputs are complete."""
    start = time.perf_counter()
    for number, (prompt, tokens) in enumerate(work):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        failure = core.add_request(AddRequest(first_id + number, prompt, params))
        assert failure is None, failure
    count = 0
    while core.has_work:
        count += sum(len(delta.token_ids) for delta in core.step().deltas)
    assert count == sum(tokens for _, tokens in work)
    return time.perf_counter() - start


def run_static(model: Any, work: list[tuple[list[int], int]], batch: int) -> float:
    """Seconds of generate() over batches of `batch` requests."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for first in range(0, len(work), batch):
        part = work[first : first + batch]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(tokens for _, tokens in part)
        out = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=longest,
                             min_new_tokens=longest, do_sample=False, eos_token_id=None)  # fmt: skip
        out.cpu()
    return time.perf_counter() - start


def run(device: str, quick: bool) -> dict[str, Any]:
    """Tokens per second of both sides and their ratio, printed and returned with every round."""
    workload = Workload(256, 512, 128, 128, 64) if device == "cuda" else Workload(4, 8, 4, 4, 2)
    rounds = 1 if quick or device == "cpu" else 3
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = make_checkpoint(folder, device).vocab_size
        options = dict(num_gpu_blocks_override=64) if device == "cpu" else dict(gpu_memory_utilization=0.5)
        config = EngineConfig.from_dict(
            dict(model=folder, device=device, max_model_len=4096 if device == "cuda" else 256,
                 max_num_seqs=workload.max_num_seqs, enable_prefix_caching=False, **options)
        )  # fmt: skip
        core = EngineCore(config, ModelRunner(config))
        static = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        static = static.eval().to(device)
    work = workload.draw(vocab_size)
    tokens = sum(count for _, count in work)
    warm = [(prompt, 4) for prompt, _ in work[: workload.static_batch]]
    times: dict[str, list[float]] = {"inflight": [], "generate() static": []}
    with torch.inference_mode():
        run_inflight(core, warm, 10**6)
        run_static(static, warm, workload.static_batch)
        for number in range(rounds):
            times["inflight"].append(run_inflight(core, work, number * len(work)))
            times["generate() static"].append(run_static(static, work, workload.static_batch))
    rates = {side: tokens / statistics.median(spent) for side, spent in times.items()}
    ratio = statistics.median(b / a for a, b in zip(*times.values()))
    for side, rate in rates.items():
        print(f"{side:<18} {rate:10.1f} tokens/s")
    print(f"inflight / generate(): {ratio:.2f}; {len(work)} requests, {tokens} tokens, {rounds} rounds")
    return dict(workload=vars(workload), tokens=tokens, tokens_per_second=rates, ratio=ratio, seconds=times)
