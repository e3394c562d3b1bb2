#!/usr/bin/env python3
"""Steps with LoRA adapters: an engine without LoRA, LoRA that is on and unused, one adapter, eight adapters.

    python bench/lora.py [--dtype bfloat16] [--rows 16] [--adapters 8] [--rank 16] [--steps 24] [--rounds 5]
                         [--loads 20] [--only-gaps] [--shape qwen3-0.6b-rand] [--output FILE]

The model has the shape of Qwen3-0.6B, with random weights; adapters have all seven projections.  All sides run in this
process and take turns, a few decode steps each, so that drift of the machine affects all alike.  The ratios are of the
times of whole steps with `--rows` rows (base / side), of their CPU time, and of a prompt of 512 tokens.

Then eight streams decode while `--loads` adapters are loaded one after another, in four groups, with as many steps
without loads after each group: the ratio of the 99th percentiles of their gaps (with / without), which are the times
from step to step here.  Of fewer than 500 gaps the longest are compared instead, and the output says so.  How long a
load takes beside the streams and on an idle engine is told, too, with its waits for running requests; and how much of
it is work.  `--only-gaps` leaves out the rest.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common

SHAPE = "qwen3-0.6b-rand"
PROMPT = 512
STREAMS = 8  # beside the loads
GROUPS = 4  # of loads
IDLE_LOADS = 5
FEWEST_GAPS = 500  # for a 99th percentile: with fewer it is one of the five longest


def make_adapter(folder: Path, checkpoint: Path, rank: int, seed: int) -> Any:
    """Random matrices for every projection, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from inflight.adapters.spec import CONFIG, WEIGHTS, describe_adapter

    config = json.loads((checkpoint / "config.json").read_text())
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, config["num_key_value_heads"] * head
    sizes = {"self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key), "self_attn.v_proj": (hidden, key)}
    sizes |= {"self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, middle), "mlp.up_proj": (hidden, middle)}
    sizes["mlp.down_proj"] = middle, hidden
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight"] = matrix.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    targets = [name.split(".")[1] for name in sizes]
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(values))
    return describe_adapter(folder, folder.name, rank)


def steps_of(core: Any, ids: Any, adapters: list[Any], rows: int, steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each decode step of `rows` rows, which take turns with the adapters."""
    for row in range(rows):
        add(core, next(ids), [1 + row, 2, 3, 4], steps + 3, adapters[row % len(adapters)])
    seconds = []
    while core.has_work:
        start, cpu = time.perf_counter(), time.process_time()
        message = core.step()
        if message.num_tokens == rows and message.stats.batch_size == rows:
            seconds.append((time.perf_counter() - start, time.process_time() - cpu))
    return seconds[2:]


def prompt_of(core: Any, ids: Any, adapters: list[Any]) -> float:
    """Seconds to the first token of a prompt."""
    start = time.perf_counter()
    add(core, next(ids), list(range(5, 5 + PROMPT)), 1, adapters[0])
    common.drain(core)
    return time.perf_counter() - start


def add(core: Any, request_id: int, prompt: list[int], max_tokens: int, adapter: Any) -> None:
    from inflight.engine.attached import Attached
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    failure = core.add_request(AddRequest(request_id, prompt, params, attached=Attached(adapter=adapter)))
    assert failure is None, failure


def gaps_beside_loads(core: Any, ids: Any, adapter: Any, loaded: list[Any], others: list[Any]) -> common.Run:
    """The longest gaps of streams with `adapter`, while `loaded` are loaded one by one, and without.

    Then `others` are loaded without streams.
    """
    limit, streams = core.info.max_model_len - 8, [next(ids) for _ in range(STREAMS)]
    for row, request_id in enumerate(streams):
        add(core, request_id, [1 + row, 2, 3, 4], limit, adapter)

    def gaps(goes_on: Any) -> list[float]:
        found, last = [], time.perf_counter()
        while goes_on(len(found)):
            assert core.step().num_tokens == STREAMS, "the streams have ended; ask for fewer --loads"
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found

    def gaps_alone(number: int) -> list[float]:
        return gaps(lambda count: count < number)

    while core.step().num_tokens != STREAMS:
        pass
    gaps_alone(8)

    load_seconds: list[float] = []  # from submission to end
    work_seconds: list[float] = []

    def load(ref: Any) -> Any:
        began = time.perf_counter()
        loading = core.info.adapters.load(ref)
        loading.add_done_callback(lambda done: load_seconds.append(time.perf_counter() - began))
        return loading

    def gaps_beside(group: list[Any]) -> list[float]:
        open_loads, waiting = [], list(group)

        def is_loading(count: int) -> bool:
            if not open_loads or open_loads[-1].done():
                work_seconds.extend(done.result()["seconds"] for done in open_loads)
                open_loads.clear()
                if not waiting:
                    return False
                open_loads.append(load(waiting.pop()))
            return True

        return gaps(is_loading)

    beside: list[float] = []
    alone: list[float] = []
    for group in range(GROUPS):
        beside += gaps_beside(loaded[group::GROUPS])
        alone += gaps_alone(len(beside) - len(alone))
    for request_id in streams:
        core.abort(request_id)
    common.drain(core)
    alone.sort()
    beside.sort()
    figure = "p99" if len(beside) >= FEWEST_GAPS else "longest"
    high = [common.percentile(found, 99) if figure == "p99" else found[-1] for found in (alone, beside)]
    figures = {"alone": high[0], "beside": high[1], "ratio": high[1] / high[0]}
    p50 = common.percentile(beside, 50) / common.percentile(alone, 50)
    loads = {"load": statistics.median(load_seconds), "load_work": statistics.median(work_seconds)}
    idle = []
    for one in others:
        began = time.perf_counter()
        core.info.adapters.load(one).result()
        idle.append(time.perf_counter() - began)
    loads["load_idle"] = statistics.median(idle)
    return {"steps": len(beside), "figure": figure, **figures, "p50": p50, **loads}


def main() -> None:
    more = dict(dtype=common.choice(["bfloat16", "float32"], "bfloat16"), shape=SHAPE, loads=20, only_gaps=False)
    args = common.options(__doc__, **more, rows=16, adapters=8, rank=16, steps=24, rounds=5, threads=2)
    path = common.checkpoint(args.shape, args.dtype)
    options = {
        "model": path,
        "dtype": args.dtype,
        "max_num_seqs": max(32, args.rows),
        "max_model_len": 2048,
        "kv_cache_memory": "2GiB",
        "cpu_threads": args.threads,
        "enable_prefix_caching": False,
        "check_on_load": False,
    }
    with TemporaryDirectory() as folder:
        count = args.adapters + args.loads + IDLE_LOADS
        every = [make_adapter(Path(folder) / f"adapter-{i}", Path(path), args.rank, seed=i) for i in range(count)]
        made, loaded, others = every[: args.adapters], every[args.adapters : -IDLE_LOADS], every[-IDLE_LOADS:]
        lora = common.engine({**options, "enable_lora": True, "max_lora_rank": args.rank})
        sides = {
            "unused": (lora, [None]),
            "one adapter": (lora, made[:1]),
            f"{args.adapters} adapters": (lora, made),
        }
        if not args.only_gaps:
            sides = {"without LoRA": (common.engine(options), [None]), **sides}
        ids = iter(range(10**9))
        for core, adapters in sides.values():  # loads the adapters
            steps_of(core, ids, adapters, args.rows, 4)
        runs: dict[str, list[common.Run]] = {side: [] for side in sides}
        for _ in range(0 if args.only_gaps else args.rounds):
            for side, (core, adapters) in sides.items():
                seconds, cpu = zip(*steps_of(core, ids, adapters, args.rows, args.steps))
                prompt = min(prompt_of(core, ids, adapters) for _ in range(2))
                run = {"step": statistics.median(seconds), "fastest": min(seconds), "prompt": prompt}
                runs[side].append({**run, "cpu": statistics.median(cpu), "least_cpu": min(cpu)})
        gaps = gaps_beside_loads(lora, ids, made[0], loaded, others) if loaded else None
    report(args, runs, gaps)


def report(args: Any, runs: dict[str, list[common.Run]], gaps: common.Run | None) -> None:
    if args.only_gaps:
        runs = {}
    base = runs.get("without LoRA", [])
    print(
        f"{common.machine()}, {args.dtype}, {args.rows} rows, rank {args.rank}, {args.rounds} rounds; "
        "ratios are base / side"
    )
    ratios = {}
    for side, found in runs.items():
        figures = ("step", "fastest", "cpu", "least_cpu", "prompt")
        ratios[side] = {name: common.median_ratio(base, found, name) for name in figures}
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios[side].items())
        milliseconds = common.median(found, "step") * 1000
        print(f"  {side:<14} {milliseconds:7.1f} ms a step; {shown}")
    if gaps is not None:
        alone, beside = gaps["alone"] * 1000, gaps["beside"] * 1000
        print(
            f"  gaps of {STREAMS} streams beside {args.loads} loads ({gaps['steps']} steps): {gaps['figure']} "
            f"{beside:.1f} ms, {alone:.1f} ms without, ratio {gaps['ratio']:.2f}; of the medians {gaps['p50']:.2f}"
        )
        print(
            f"  a load takes {gaps['load']:.2f} s beside them, {gaps['load_work']:.2f} s of it work, and "
            f"{gaps['load_idle']:.2f} s on the idle engine"
        )
    common.record(args, runs, ratios=ratios, gaps=gaps)


if __name__ == "__main__":
    main()
