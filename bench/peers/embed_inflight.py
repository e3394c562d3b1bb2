"""Inflight's `LLM.embed` for `bench/pooling.py`."""

from __future__ import annotations

from typing import Any

import embed_job

from inflight import LLM


def load(task: dict[str, Any]) -> LLM:
    stored = {
        "int8": {"dtype": "float32", "quantization": "int8"},
        "int4": {"dtype": "float32", "quantization": "int4"},
    }
    kept = stored.get(task["dtype"], {"dtype": task["dtype"]})
    length = task["options"]["max_model_len"]
    return LLM(task["folder"], cpu_threads=task["threads"], kv_cache_memory="2GiB", max_model_len=length, **kept)


def embed(llm: LLM, texts: list[str]) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts)]


if __name__ == "__main__":
    embed_job.run(["triton-inflight", "torch", "transformers"], load, embed)
