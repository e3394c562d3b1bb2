"""OpenVINO GenAI's ContinuousBatchingPipeline for `bench/decoding.py`: `python decode_openvino.py JOB.json`.

The job has: `checkpoint` (an OpenVINO IR), `streams`, `steps`, `warm_up_steps`, `prompt`, `vocab_size`, `threads`,
`result` (the file to write).
"""

from __future__ import annotations

import itertools
import time

import job
import numpy as np
import openvino as ov
import openvino_genai as genai

task = job.read()
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 2
scheduler.max_num_seqs = max(task["streams"])
scheduler.max_num_batched_tokens = 2048
pipe = genai.ContinuousBatchingPipeline(
    task["checkpoint"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": task["threads"]}
)
rng = np.random.default_rng(1)
number = itertools.count()
handles = []  # a request whose handle is gone is cancelled


def add(prompt: int, output: int) -> None:
    config = genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
    tokens = ov.Tensor(rng.integers(300, task["vocab_size"], (1, prompt)))
    handles.append(pipe.add_request(next(number), tokens, config))


def drain() -> None:
    while pipe.has_non_finished_requests():
        pipe.step()
    handles.clear()


add(16, 4)
drain()
figures = {}
for streams in task["streams"]:
    for _ in range(streams):
        add(16, task["warm_up_steps"] + task["steps"] + 8)
    for _ in range(task["warm_up_steps"]):
        pipe.step()
    began = time.perf_counter()
    for _ in range(task["steps"]):
        pipe.step()
    figures[f"decode {streams}"] = streams * task["steps"] / (time.perf_counter() - began)
    drain()
add(64, 1)
drain()
began = time.perf_counter()
add(task["prompt"], 1)
drain()
figures["prefill"] = task["prompt"] / (time.perf_counter() - began)
job.write({"figures": figures, "versions": {"openvino-genai": genai.__version__}})
