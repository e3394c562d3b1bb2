#!/usr/bin/env python3
"""A profile of engine steps as a flame graph: Python, torch and GPU activity of a real run.

    python bench/profile_step.py [--model CHECKPOINT] [--sequences 8] [--prompt-tokens 64] [--steps 20]
                                 [--set KEY=VALUE ...] [--output profile.perfetto.json]

Runs the engine in this process: the first step computes the prompts, every further one decodes a token of
each sequence.  Open the file in ui.perfetto.dev or chrome://tracing.  The native forward pass of a CPU is a
single call; with `--set native_forward=false` the model's layers and operations appear one by one.  Recording
every Python call slows the host down, so compare slices with each other, not with the clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from inflight import LLM, SamplingParams
from inflight_tools.repository import parse_setting

DEMO = Path(__file__).parents[1] / "model_repository" / "demo" / "1" / "checkpoint"
OPTIONS = {"kv_cache_memory": "256MiB", "enable_prefix_caching": False}


def record(llm: LLM, sequences: int, prompt_tokens: int, steps: int) -> profile:
    """Profile a run of `steps` steps, after one that is not recorded."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, llm.core.info.vocab_size, (sequences, prompt_tokens)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    llm.generate(prompts, params)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, with_stack=True) as profiler:
        llm.generate(prompts, params)
    return profiler


def slices(path: Path) -> list[dict[str, Any]]:
    """The complete events of a recorded file."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(DEMO), help="checkpoint directory; default: the demo model")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in the batch")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=20, help="steps, the prefill included")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of model.json; repeatable"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("profile.perfetto.json"), help="Chrome trace; .gz compresses"
    )
    args = parser.parse_args(arguments)
    options = {**OPTIONS, **dict(map(parse_setting, args.set))}
    llm = LLM(args.model, **options)
    record(llm, args.sequences, args.prompt_tokens, args.steps).export_chrome_trace(str(args.output))
    print(f"wrote {args.output}: {args.steps} steps, {len(slices(args.output))} slices; open it in ui.perfetto.dev")


if __name__ == "__main__":
    main()
