"""Hugging Face `generate()` in left-padded static batches of 8; only requested tokens count."""

from __future__ import annotations

from typing import Any

import job
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

BATCH = 8


def load(task: dict[str, Any]) -> PreTrainedModel:
    torch.set_num_threads(task["threads"])
    dtype = getattr(torch, job.TORCH_DTYPES[task["weights"]])
    return AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype, attn_implementation="sdpa").eval()


@torch.inference_mode()
def generate(model: PreTrainedModel, requests: list[dict[str, Any]]) -> list[list[int]]:
    outputs: list[list[int]] = []
    for first in range(0, len(requests), BATCH):
        part = requests[first : first + BATCH]
        width = max(len(request["prompt"]) for request in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        count = max(request["out"] for request in part)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None)
        outputs += [row[width : width + request["out"]].tolist() for row, request in zip(out, part)]
    return outputs


if __name__ == "__main__":
    job.run(["torch", "transformers"], load, generate)
