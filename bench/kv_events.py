#!/usr/bin/env python3
"""CPU time of a step outside the device, with KV events and without: runs in alternating pairs, in one process.

    python bench/kv_events.py [--prompt 512] [--max-tokens 128] [--requests 256] [--pairs 6] [--output FILE]

The real scheduler and pool, without a device.  64 requests run at a time, with steps of 512 tokens; no two share a
prefix and the pool holds 16 of them beyond these, so that nearly every step stores and evicts blocks.  A process
subscribes.  "engine" is the time of the engine's thread, "process" includes the thread that publishes and ZeroMQ's.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from typing import Any

import common

from inflight.config import EngineConfig
from inflight.engine.kv_events.kv_events import KVEvents, make_kv_events
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.selection import make_policies
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.scheduler import Scheduler, SchedulerLimits
from inflight.engine.step import StepOutput

BLOCK_SIZE, RUNNING, STEP_TOKENS = 16, 64, 512
PORT = 25999
SUBSCRIBER = (
    "import zmq\nsocket = zmq.Context().socket(zmq.SUB)\nsocket.subscribe(b'')\n"
    f"socket.connect('tcp://127.0.0.1:{PORT}')\nwhile True:\n    socket.recv_multipart()\n"
)


def serve(args: Any, events: KVEvents | None) -> dict[str, float]:
    """Serve all requests; microseconds of CPU time of a step."""
    rng = random.Random(1)
    blocks = (RUNNING + 16) * (-(-(args.prompt + args.max_tokens) // BLOCK_SIZE) + 1)
    pool, listener = (KVPool(blocks, BLOCK_SIZE), None) if events is None else events.pool(blocks, BLOCK_SIZE)
    policies = make_policies(EngineConfig(model="none", max_num_seqs=RUNNING, admission="free_blocks"))
    scheduler = Scheduler(SchedulerLimits(RUNNING, STEP_TOKENS), pool, policies)
    for request_id in range(args.requests):
        prompt = [rng.randrange(32_000) for _ in range(args.prompt)]
        scheduler.add(Request(request_id, prompt, SamplingParams(max_tokens=args.max_tokens), cache_salts=("",)))
    steps = 0
    done: Any = None
    process, thread = time.process_time(), time.thread_time()
    while scheduler.has_work:
        out = scheduler.schedule()
        scheduler.update(out, StepOutput([5 if samples else -1 for samples in out.samples]))
        if listener is not None:
            listener.step_done(done)  # it asks nothing of the step
        steps += 1
    process, thread = time.process_time() - process, time.thread_time() - thread
    return {"engine_us": 1e6 * thread / steps, "process_us": 1e6 * process / steps, "steps": steps}


def main() -> None:
    args = common.options(__doc__, prompt=512, max_tokens=128, requests=256, pairs=6)
    options = {"enable_kv_cache_events": True, "endpoint": f"tcp://lo:{PORT}"}
    events = make_kv_events(EngineConfig.from_dict({"model": "none", "kv_events_config": options}))
    assert events is not None
    child = subprocess.Popen([sys.executable, "-c", SUBSCRIBER])
    try:
        pairs = [(serve(args, None), serve(args, events)) for _ in range(args.pairs + 1)][1:]
    finally:
        child.kill()
        child.wait()
        events.close()
    batches, dropped = events.totals()
    print(f"{common.machine()}, {pairs[0][0]['steps']} steps, medians of {args.pairs} pairs; {dropped} batches dropped")
    summary = {"batches": batches / (args.pairs + 1), "dropped": dropped, "steps": pairs[0][0]["steps"]}
    for name in ("engine_us", "process_us"):
        off, on = (statistics.median(run[name] for run in runs) for runs in zip(*pairs))
        summary |= {f"{name}_off": off, f"{name}_on": on}
        print(f"  {name.removesuffix('_us'):8} {off:6.1f} us a step without events, {on:6.1f} us with")
    common.record(args, {"kv_events": pairs}, summary=[summary])


if __name__ == "__main__":
    main()
