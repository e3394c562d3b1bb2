"""OpenVINO GenAI's TextEmbeddingPipeline for `bench/pooling.py`; it pads the texts of a call to the longest."""

from __future__ import annotations

from typing import Any

import embed_job
import openvino_genai as genai

_HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}  # int8: weights, and inputs by the default of the plugin


def load(task: dict[str, Any]) -> tuple[genai.TextEmbeddingPipeline, int]:
    config = genai.TextEmbeddingPipeline.Config()
    config.pooling_type = getattr(genai.TextEmbeddingPipeline.PoolingType, task["options"]["pooling"])
    config.normalize = True
    if config.pooling_type == genai.TextEmbeddingPipeline.PoolingType.LAST_TOKEN:
        config.padding_side = "left"
    hints = {"INFERENCE_NUM_THREADS": task["threads"], "INFERENCE_PRECISION_HINT": _HINTS[task["dtype"]]}
    return genai.TextEmbeddingPipeline(task["folder"], "CPU", config, **hints), task["batch"]


def embed(engine: tuple[genai.TextEmbeddingPipeline, int], texts: list[str]) -> list[list[float]]:
    pipeline, batch = engine
    return embed_job.in_batches(lambda one, given: one.embed_documents(given), pipeline, texts, batch)


if __name__ == "__main__":
    embed_job.run(["openvino", "openvino-genai"], load, embed)
