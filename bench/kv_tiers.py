#!/usr/bin/env python3
"""KV tiers: a long conversation that returns in a new process, and what tiers cost where they find nothing.

    python bench/kv_tiers.py [--model llama-60m-rand] [--prompt 8000] [--rounds 5] [--parts returns ...] [--output FILE]
                             [--llama-cpp FOLDER]

Every run is an engine in a fresh process, with the kept weights of an earlier one, and a disk tier in a temporary
folder.  The sides of a part alternate.

    returns     seconds to the first token of a stored prompt: computed without tiers; from files in the page cache
                (warm); and with the files dropped from it (cold).  With --llama-cpp also llama-server of that folder,
                whose client saves the slot and restores it (kv_tiers_peers.py)
    misses      tokens/s of 64 requests that no tier has: without tiers, and with one that also writes them; and which
                share of the CPU time is the tier's, in its threads and in the engine's
    many        50 requests with one stored prompt at once, and one alone; and both when the pool has it already: time
                to the first token of the last, and CPU time until then
    others      the gaps between tokens of 8 streams in the second after a request with a stored prompt arrives, whose
                prompt is loaded, or in the pool already (cached), or computed; and alone: median, p99, the longest, and
                how many; without the steps that compute its own tokens, which read all of its KV; only while it is
                loaded; and how long the steps are until its first token, in which it arrives, has loads in flight,
                waits, or computes
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import kv_tiers_peers

PARTS = {
    "returns": ("computed", "warm", "cold"),
    "misses": ("without", "with"),
    "many": ("one", "one cached", "fifty", "fifty cached"),
    "others": ("alone", "loaded", "cached", "computed beside"),
}
TAIL = 8  # tokens of the new question
OUTPUT = 8
STREAMS, STREAM_TOKENS, GAPS_BEFORE = 8, 800, 40
WINDOW = 1.0  # seconds in which gaps are compared


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 30_000) for _ in range(count)]


def question(arguments: dict[str, Any], seed: int = 0) -> list[int]:
    """The stored conversation and a new question."""
    return tokens(arguments["prompt"]) + tokens(TAIL, 1000 + seed)


def engine(arguments: dict[str, Any], tiers: bool) -> Any:
    """An engine that has measured what it computes, with the prefix cache on."""
    tier = {"type": "disk", "path": arguments["folder"], "size": "50GiB"}
    options = {
        **common.engine_options({"dtype": arguments["dtype"], "threads": arguments["threads"]}),
        "model": common.checkpoint(arguments["model"], arguments["dtype"]),
        "kv_cache_memory": arguments["kv_cache_memory"],
        "enable_prefix_caching": True,
        "max_num_seqs": 64,
        "kv_tiers": [tier] if tiers else [],
    }
    core = common.engine(options)
    for number in range(3):
        new = tokens(600, os.getpid() * 100 + number)  # no tier has it: the time to compute a token is learned
        common.add(core, 10**6 + number, new, max_tokens=OUTPUT, cache_salt="warm-up")
        run(core)
    return core


def run(core: Any, until: int | None = None) -> dict[int, list[tuple[float, list[int]]]]:
    """Step until no request is left, or the request `until` has a token; the arrivals of tokens by request."""
    from inflight.engine.held_requests import HELD_POLL_SECONDS

    came: dict[int, list[tuple[float, list[int]]]] = {}
    while core.has_work and (until is None or until not in came):
        message = core.step()
        assert not message.failed, message.failed
        now = time.perf_counter()
        for delta in message.deltas:
            came.setdefault(delta.request_id, []).append((now, delta.token_ids))
        columns = message.tokens
        for request_id, token in zip(columns.request_ids, columns.token_ids):
            came.setdefault(request_id, []).append((now, [token]))
        if not message.stats.batch_size:
            time.sleep(HELD_POLL_SECONDS)
    return came


def hits(core: Any) -> int:
    totals = core.scheduler.policies.tier_totals()
    return 0 if totals is None else totals.hits_total


def store(side: str, arguments: dict[str, Any]) -> common.Run:
    """Compute the conversation once, and leave it in the folder."""
    core = engine(arguments, tiers=True)
    common.add(core, 0, tokens(arguments["prompt"]), max_tokens=OUTPUT)
    run(core)
    core.info.tiers.close(120.0)
    size = sum(path.stat().st_size for path in Path(arguments["folder"]).rglob("*") if path.is_file())
    return {"bytes": size}


def returns(side: str, arguments: dict[str, Any]) -> common.Run:
    core = engine(arguments, tiers=side != "computed")
    prompt = question(arguments)
    if side == "cold":
        drop_pages(Path(arguments["folder"]))
    start, cpu = time.perf_counter(), time.process_time()
    common.add(core, 0, prompt, max_tokens=OUTPUT)
    came = run(core, until=0)
    seconds, cpu = came[0][0][0] - start, time.process_time() - cpu
    found = [token for _, part in came[0] + run(core)[0] for token in part]
    return {"seconds": seconds, "cpu_seconds": cpu, "tokens": found, "hits": hits(core)}


def misses(side: str, arguments: dict[str, Any]) -> common.Run:
    spent = count_cpu_of_tiers()
    core = engine(arguments, tiers=side == "with")
    spent.clear()
    requests = [
        {"id": number, "prompt": tokens(300, 5000 + number + os.getpid() * 100), "out": 32} for number in range(64)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        common.add(core, request["id"], request["prompt"], max_tokens=request["out"])
    run(core)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"tokens_per_second": 64 * 32 / seconds, "cpu_seconds": cpu, "tier_share": sum(spent) / cpu}


def count_cpu_of_tiers() -> list[float]:
    """Receives the CPU seconds of each thing that tiers do when they find nothing."""
    from inflight.engine.policies.tier_admission import TierAdmission
    from inflight.engine.tiers.loads import Loads
    from inflight.engine.tiers.tier import Tier
    from inflight.engine.tiers.writer import TierWriter

    spent: list[float] = []

    def counted(work: Any) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return work(*args, **options)
            finally:
                spent.append(time.thread_time() - start)

        return count

    for kind, names in (
        (Tier, ("_find", "_write")),
        (Loads, ("step_begins", "step_made", "step_done", "left", "ended")),
        (TierAdmission, ("admits", "step_done", "left", "ended")),
        (TierWriter, ("admitted", "step_begins", "step_made", "step_done", "left", "ended")),
    ):
        for name in names:
            setattr(kind, name, counted(getattr(kind, name)))
    return spent


def many(side: str, arguments: dict[str, Any]) -> common.Run:
    core = engine(arguments, tiers=True)
    wait_for_pages(core)
    if side.endswith("cached"):
        common.add(core, 1000, question(arguments, 1000), max_tokens=1)
        run(core)
    questions = [question(arguments, number) for number in range(50 if side.startswith("fifty") else 1)]
    start, cpu = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(questions):
        common.add(core, number, prompt, max_tokens=OUTPUT)
    came = run(core, until=len(questions) - 1)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert len(came) == len(questions), "the last request has overtaken others"
    totals = core.scheduler.policies.tier_totals()
    return {"seconds": seconds, "cpu_seconds": cpu, "hits": totals.hits_total, "extents": totals.tiers[0].loaded_total}


def others(side: str, arguments: dict[str, Any]) -> common.Run:
    core = engine(arguments, tiers=side != "computed beside")
    wait_for_pages(core)
    if side == "cached":
        common.add(core, 1000, question(arguments, 1000), max_tokens=1)
        run(core)
    returned = question(arguments)
    for number in range(STREAMS):
        common.add(core, number, tokens(40, 9000 + number), max_tokens=STREAM_TOKENS)
    came = run(core, until=0)
    while min(len(arrivals) for arrivals in came.values()) < GAPS_BEFORE or len(came) < STREAMS:
        for request_id, arrivals in run_a_step(core).items():
            came.setdefault(request_id, []).extend(arrivals)
    begun, steps = time.perf_counter(), list[tuple[str, float, float]]()
    if side != "alone":
        common.add(core, 100, returned, max_tokens=OUTPUT)
    while core.has_work:
        start, loads = time.perf_counter(), core.info.tiers is not None and len(core.info.tiers.loads)
        here = run_a_step(core)
        for request_id, arrivals in here.items():
            came.setdefault(request_id, []).extend(arrivals)
        kind = "arrives" if not steps else "computes" if 100 in here else "loads" if loads else "waits"
        steps.append((kind, start, time.perf_counter()))
    first = came[100][0][0] if side != "alone" else begun + WINDOW
    gaps = [
        (earlier, later)
        for request_id in range(STREAMS)
        for (earlier, _), (later, _) in zip(came[request_id], came[request_id][1:])
        if later >= begun
    ]
    assert max(earlier for earlier, _ in gaps) > begun + WINDOW, "the streams end within the window"
    waiting = [(earlier, later) for earlier, later in gaps if later < first]  # but for the step of its own tokens
    own = [(earlier, later) for earlier, later in gaps if side != "alone" and first <= later <= came[100][-1][0]]
    window = [gap for gap in gaps if gap[0] <= begun + WINDOW]
    own_steps = set(own)
    apart = [gap for gap in window if gap not in own_steps]
    return {
        **figures_of("", window),
        **(figures_of("apart_", apart) if apart else {}),
        **(figures_of("waiting_", waiting) if side == "loaded" else {}),
        **(figures_of("own_", own) if own else {}),
        "seconds": first - begun,
        "hits": hits(core),
        "steps": kinds([step for step in steps if step[1] <= first]),
    }


def wait_for_pages(core: Any) -> None:
    """Until the system has provided the pool's memory, as it has in an engine that has been up for a minute."""
    import threading

    while any(thread.name == "kv-pages" for thread in threading.enumerate()):
        time.sleep(0.01)


def kinds(steps: list[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """Of the steps in which the request arrives, has loads in flight, waits, or computes: how many, and how long."""
    seconds: dict[str, list[float]] = {}
    for kind, start, end in steps:
        seconds.setdefault(kind, []).append(end - start)
    return {
        kind: {"steps": len(all_), "p50": statistics.median(all_), "longest": max(all_)}
        for kind, all_ in seconds.items()
    }


def figures_of(name: str, gaps: list[tuple[float, float]]) -> common.Run:
    """Of gaps (from, to): percentiles, the longest, and how many they are."""
    seconds = sorted(later - earlier for earlier, later in gaps)
    found = {f"p{percent}": common.percentile(seconds, percent) for percent in (50, 99)}
    found |= {"longest": seconds[-1], "gaps": len(seconds)}
    return {name + key: value for key, value in found.items()}


def run_a_step(core: Any) -> dict[int, list[tuple[float, list[int]]]]:
    message = core.step()
    now = time.perf_counter()
    columns = message.tokens
    came = {delta.request_id: [(now, delta.token_ids)] for delta in message.deltas}
    return came | {number: [(now, [token])] for number, token in zip(columns.request_ids, columns.token_ids)}


def drop_pages(folder: Path) -> None:
    """Out of the page cache, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


SIDES = {side: part for part, sides in PARTS.items() for side in sides}
RUNS = {"returns": returns, "misses": misses, "many": many, "others": others}


def one_side(side: str, arguments: dict[str, Any]) -> common.Run:
    return (RUNS[SIDES[side]] if side in SIDES else store)(side, arguments)


def summary_of(part: str, runs: dict[str, list[common.Run]]) -> dict[str, Any]:
    """The ratios of a part, pair by pair."""
    if part == "returns":
        for side in ("warm", "cold"):
            assert all(run["hits"] for run in runs[side]), f"{side}: nothing was found"
        ours = [runs[side] for side in PARTS[part]]
        equal = all(len({tuple(run["tokens"]) for run in found}) == 1 for found in zip(*ours))
        computed = {side: side.replace("warm", "computed").replace("cold", "computed") for side in runs}
        faster = {
            side: {name: common.median_ratio(runs[other], runs[side], name) for name in ("seconds", "cpu_seconds")}
            for side, other in computed.items()
            if side != other
        }
        return {"medians": common.medians(runs, "seconds", "cpu_seconds"), "faster": faster, "equal": equal}
    if part == "misses":
        names = ("tokens_per_second", "cpu_seconds")
        share = statistics.median(run["tier_share"] for run in runs["with"])
        return {name: common.median_ratio(runs["with"], runs["without"], name) for name in names} | {"share": share}
    if part == "many":
        return {
            "fifty / one": common.median_ratio(runs["fifty"], runs["one"], "seconds"),
            "fifty cached / one cached": common.median_ratio(runs["fifty cached"], runs["one cached"], "seconds"),
            "fifty / fifty cached": {
                name: common.median_ratio(runs["fifty"], runs["fifty cached"], name)
                for name in ("seconds", "cpu_seconds")
            },
            "extents": [statistics.median(run["extents"] for run in runs[side]) for side in runs],
        }
    names = ("p50", "p99", "longest")
    ratios = {side: {name: common.median_ratio(runs[side], runs["alone"], name) for name in names} for side in runs}
    ratios["apart from its own steps"] = {
        side: {name: common.median_ratio(runs[side], runs["alone"], f"apart_{name}") for name in names}
        for side in ("loaded", "cached")
    }
    ratios["own steps: loaded / cached"] = {
        name: common.median_ratio(runs["loaded"], runs["cached"], f"own_{name}") for name in names
    }
    ratios["loaded / cached"] = {name: common.median_ratio(runs["loaded"], runs["cached"], name) for name in names}
    ratios["while it is loaded"] = {
        name: statistics.median(
            loaded[f"waiting_{name}"] / alone[name] for loaded, alone in zip(runs["loaded"], runs["alone"])
        )
        for name in names
    }
    columns = ("quiet", "alone"), ("from the pool", "cached"), ("from the tier", "loaded")
    three = {column: {name: common.median(runs[side], name) for name in (*names, "gaps")} for column, side in columns}
    return {"columns": three, "medians": common.medians(runs, *names, "gaps"), **ratios}


def run_side(side: str, arguments: dict[str, Any]) -> common.Run:
    """In a fresh process: Inflight's, or the peer's server."""
    if side not in kv_tiers_peers.SIDES:
        return common.in_fresh_process(__file__, side, arguments)
    return kv_tiers_peers.run(side, question(arguments), in_folder_of_peer(arguments), drop_pages)


def stored_by_peer(arguments: dict[str, Any]) -> dict[str, Any]:
    found = kv_tiers_peers.store(tokens(arguments["prompt"]), in_folder_of_peer(arguments))
    return {**found, "version": kv_tiers_peers.version(arguments)}


def in_folder_of_peer(arguments: dict[str, Any]) -> dict[str, Any]:
    folder = Path(arguments["folder"]) / "llama.cpp"
    folder.mkdir(exist_ok=True)
    return {**arguments, "folder": f"{folder}/"}


def figures(run: common.Run) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in run.items() if isinstance(value, int | float))


def main() -> None:
    if common.ran_side(one_side):
        return
    args = common.options(
        __doc__,
        model=common.choice(["llama-60m-rand", "qwen3-0.6b-rand"], "llama-60m-rand"),
        dtype=common.choice(["bfloat16", "float32"], "bfloat16"),
        prompt=8000,
        rounds=5,
        threads=os.cpu_count(),
        kv_cache_memory="2GiB",
        parts=common.choice(PARTS),
        llama_cpp=dict(default="", help="a folder with llama-server, which runs beside Inflight"),
    )
    common.checkpoint(args.model, args.dtype)
    folder = tempfile.mkdtemp(prefix="inflight-kv-")
    arguments = {**{name: value for name, value in vars(args).items() if name != "output"}, "folder": folder}
    found, summary, attempts = {}, {}, common.Attempts()
    try:
        stored = common.in_fresh_process(__file__, "store", arguments)
        print(f"stored {stored['bytes'] / 2**20:.0f} MiB")
        peers = kv_tiers_peers.names(arguments) if "returns" in args.parts else ()
        if peers:
            with attempts.at("llama.cpp"):
                summary["llama.cpp"] = stored_by_peer(arguments)
                print(f"llama.cpp: {summary['llama.cpp']}")
            peers = () if attempts.failed else peers
        for part in args.parts:
            sides = PARTS[part] + (peers if part == "returns" else ())
            found[part] = common.alternate(
                sides, args.rounds, lambda side, _: run_side(side, arguments), figures, attempts
            )
            with attempts.at(part):
                whole = {side: runs for side, runs in found[part].items() if side not in attempts.failed}
                summary[part] = summary_of(part, whole)
                print(f"{part}: {summary[part]}", flush=True)
            common.record(args, found, stored_bytes=stored["bytes"], summary=summary, failed=attempts.failed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    attempts.end()


if __name__ == "__main__":
    main()
