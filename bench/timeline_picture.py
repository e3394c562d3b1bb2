#!/usr/bin/env python3
"""Generates the picture in the README: a real run of the demo model, drawn by `inflight trace`.

    python bench/timeline_picture.py [--output docs/images/timeline]

Starts a server with the demo checkpoint and a KV pool that is deliberately too small, so that the picture
shows preemptions, sends it 48 requests over gRPC (prompts of 4 to 400 tokens, outputs lognormal(4.0, 0.8)
in 10..370, arrivals over half a second) and writes OUTPUT.html and, if Chromium is installed, OUTPUT.png.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import common

from inflight.config import EngineConfig
from inflight_client import AsyncClient
from inflight_tools.launcher import TritonServer
from inflight_tools.repository import write_entry
from inflight_tools.trace.files import fetch_trace, render

REQUESTS, SECONDS = 48, 0.5
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 640,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": 130,
    "cpu_threads": 1,
    "step_trace": True,
}


async def send_all(address: str) -> None:
    rng = random.Random(4)

    async def one(client: AsyncClient, delay: float) -> None:
        await asyncio.sleep(delay)
        prompt = [rng.randrange(10, 2000) for _ in range(rng.choice([4, 12, 30, 60, 160, 400]))]
        tokens = min(370, max(10, round(rng.lognormvariate(4.0, 0.8))))
        await client.generate(input_ids=prompt, max_tokens=tokens, ignore_eos=True, seed=1)

    async with AsyncClient(address, model="demo") as client:
        await client.generate("warm up", max_tokens=8)
        await asyncio.gather(*(one(client, rng.uniform(0, SECONDS)) for _ in range(REQUESTS)))


def screenshot(page: Path, height: int) -> None:
    """Write OUTPUT.png and OUTPUT-dark.png, one for each colour scheme."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("Chromium not found; wrote only the page")
        return
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    for suffix, dark in (("", []), ("-dark", ["--blink-settings=preferredColorScheme=0"])):
        picture = page.with_name(f"{page.stem}{suffix}.png")
        options = [f"--screenshot={picture}", f"--window-size=1280,{height}", *dark, page.resolve().as_uri()]
        subprocess.run([*command, *options], check=True, stderr=subprocess.DEVNULL)
        print(f"wrote {picture}")


def main() -> None:
    output = dict(type=Path, default=common.ROOT / "docs" / "images" / "timeline")
    args = common.options(__doc__, output=output)
    with tempfile.TemporaryDirectory() as repository:
        write_entry(Path(repository), "demo", EngineConfig.from_dict({"model": str(common.DEMO), **OPTIONS}))
        with TritonServer(repository) as server:
            asyncio.run(send_all(server.grpc_address))
            trace = fetch_trace(server.http_address, "demo")
    requests = trace.requests[1:]  # without the warm-up
    keys = {request.key for request in requests}
    trace.steps = [step for step in trace.steps if keys & {*step.keys}]
    trace.requests = requests
    page = args.output.with_suffix(".html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_bytes(render(trace, "html", "the demo model"))
    print(f"wrote {page}")
    screenshot(page, 1290)


if __name__ == "__main__":
    main()
