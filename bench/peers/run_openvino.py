"""OpenVINO GenAI's ContinuousBatchingPipeline; the checkpoint is an OpenVINO IR (see bench/README.md)."""

from __future__ import annotations

from typing import Any

import job
import numpy as np
import openvino as ov
import openvino_genai as genai

lookup: dict[str, int] = {}  # options of a pipeline with prompt lookup: num_assistant_tokens, max_ngram_size

PRECISIONS = {"bf16": ov.Type.bf16, "fp32": ov.Type.f32, "u8": ov.Type.u8}


def load(task: dict[str, Any]) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = task["kv_gib"]
    scheduler.max_num_seqs = task["max_num_seqs"]
    scheduler.max_num_batched_tokens = task["options"].get("max_num_batched_tokens", 2048)
    properties = {
        "INFERENCE_NUM_THREADS": task["threads"],
        "INFERENCE_PRECISION_HINT": PRECISIONS[task["weights"]],
        "KV_CACHE_PRECISION": PRECISIONS[task["kv"]],
    }
    if "prompt_lookup" in task["options"]:
        properties["prompt_lookup"] = True
        lookup.update(task["options"]["prompt_lookup"])
    return genai.ContinuousBatchingPipeline(task["checkpoint"], scheduler, "CPU", properties)


def config_of(request: dict[str, Any]) -> genai.GenerationConfig:
    config = genai.GenerationConfig(max_new_tokens=request["out"], ignore_eos=True, do_sample=False)
    if temperature := request.get("temperature", 0.0):
        config.do_sample, config.temperature, config.rng_seed = True, temperature, request["id"]
    for name, value in lookup.items():
        setattr(config, name, value)
    return config


def generate(pipe: genai.ContinuousBatchingPipeline, requests: list[dict[str, Any]]) -> list[list[int]]:
    prompts = [ov.Tensor(np.array([request["prompt"]], dtype=np.int64)) for request in requests]
    configs = [config_of(request) for request in requests]
    return [list(map(int, result.m_generation_ids[0])) for result in pipe.generate(prompts, configs)]


if __name__ == "__main__":
    job.run(["openvino", "openvino-genai"], load, generate)
