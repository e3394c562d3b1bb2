#!/usr/bin/env python3
"""Goodput through a real tritonserver under more load than it can serve.

    python bench/overload_served.py [--seconds 300] [--times 1 4] [--output FILE]

As `overload.py`, with the 58 M llama in place of a simulated device: requests arrive at random (Poisson) with prompts
of 16..256 tokens, lognormal(4.0, 0.8) output tokens and timeouts of 5, 10 and 15 s, from a client on the same machine,
whose work counts against the server.  Loads are in capacities: the rate at which 256 requests at once are served.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import common
import serving
from overload import Job, make_jobs

from inflight_client import AsyncClient, DeadlineExceededError, RetryPolicy, UnavailableError

AT_ONCE = 256


async def ask(client: AsyncClient, job: Job, prompt: list[int]) -> None:
    """Send one request, which learns its ending and, if it was refused, how long that took."""
    timeout = None if job.timeout == float("inf") else job.timeout
    begun = time.perf_counter()
    try:
        params = {"max_tokens": job.length, "ignore_eos": True, "temperature": 0.0, "return_token_ids": False}
        await client.generate(input_ids=prompt, timeout=timeout, **params)
    except DeadlineExceededError:
        job.ending = "late"
    except UnavailableError:
        job.ending = "shed"
        job.arrival = time.perf_counter() - begun
    else:
        job.ending = "good" if timeout is None or time.perf_counter() - begun <= timeout else "late"


async def offer(address: str, jobs: list[Job], seed: int, at_once: bool = False) -> float:
    """Send all jobs when they arrive; returns the seconds until the last one ended."""
    draw = random.Random(seed)
    async with AsyncClient(address, model=serving.MODEL, retries=RetryPolicy(max_attempts=1)) as client:
        start, tasks = time.perf_counter(), []
        for job in jobs:
            prompt = [draw.randint(2, 1000) for _ in range(job.prompt_tokens)]
            delay = 0.0 if at_once else start + job.arrival - time.perf_counter()
            await asyncio.sleep(max(0.0, delay))
            tasks.append(asyncio.create_task(ask(client, job, prompt)))
        await asyncio.gather(*tasks)
        return time.perf_counter() - start


def measure(address: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    jobs = make_jobs(rate, seconds, seed)
    asyncio.run(offer(address, jobs, seed))
    endings = Counter(job.ending for job in jobs)
    refused = sorted(job.arrival for job in jobs if job.ending == "shed")
    return {
        "requests": len(jobs),
        **{ending: endings[ending] for ending in ("good", "late", "shed")},
        "goodput": round(endings["good"] / seconds, 2),
        "refused_after_ms": {
            f"p{percent}": round(1e3 * refused[len(refused) * percent // 100], 1) for percent in (50, 99) if refused
        },
    }


def main() -> None:
    seconds = dict(type=float, default=300.0, help="length of the last load; the others take a fifth")
    args = common.options(__doc__, seconds=seconds, times=[1.0, 4.0], seed=1)
    results: dict[str, Any] = {}
    with serving.served(common.engine_options({"dtype": "bfloat16", "threads": 2})) as server:
        serving.wait_for_rest(server)
        jobs = make_jobs(1000.0, AT_ONCE / 1000.0, 0, timeout=None)
        capacity = len(jobs) / asyncio.run(offer(server.grpc_address, jobs, 0, at_once=True))
        print(f"capacity {capacity:.2f} requests/s", flush=True)
        for load in args.times:
            seconds = args.seconds if load == args.times[-1] else args.seconds / 5
            found = results[f"{load:g}x"] = measure(server.grpc_address, load * capacity, seconds, args.seed)
            print(f"{load:g}x", json.dumps(found), flush=True)
    common.record(args, results, capacity=round(capacity, 2))


if __name__ == "__main__":
    main()
