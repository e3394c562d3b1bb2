"""The continuous batching of transformers: `ContinuousBatchingManager`, which also underlies `generate_batch`."""

from __future__ import annotations

from typing import Any

import job
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

PAGE = 16  # tokens


def load(task: dict[str, Any]) -> tuple[PreTrainedModel, ContinuousBatchingConfig]:
    torch.set_num_threads(task["threads"])
    dtype = getattr(torch, job.TORCH_DTYPES[task["weights"]])
    model = AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype, attn_implementation="sdpa").eval()
    longest = max(len(request["prompt"]) + request["out"] for request in task["requests"])
    blocks = task["max_num_seqs"] * (longest // PAGE + 1)
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=2048,
        max_requests_per_batch=task["max_num_seqs"],
        allow_block_sharing=False,
    )
    return model, config


def generate(engine: tuple[PreTrainedModel, ContinuousBatchingConfig], requests: list[dict[str, Any]]) -> list[Any]:
    model, config = engine
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(r["out"] for r in requests))
    outputs: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        for request in requests:
            manager.add_request(request["prompt"], request_id=str(request["id"]), max_new_tokens=request["out"])
        while len(outputs) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "the manager's thread ended"
            elif result.is_finished():
                assert result.error is None, result.error
                outputs[result.request_id] = list(result.generated_tokens)
    return [outputs[str(request["id"])] for request in requests]


if __name__ == "__main__":
    job.run(["torch", "transformers"], load, generate)
