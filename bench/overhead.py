#!/usr/bin/env python3
"""The cost of serving through Triton: tokens/s over gRPC streaming compared with the engine in-process.

    python bench/overhead.py [--requests 64] [--rounds 3] [--output FILE]
    python bench/overhead.py --frontends 1 2 4     the cost of a response against the number of stubs (frontends.py)

Same checkpoint, requests and threads; all requests are submitted at once, 32 sequences per step.  The
in-process side is nothing but `EngineCore.step()` in a loop: no text, no process boundary.  The other side
is a real tritonserver on 127.0.0.1 that streams text and token ids of every request to a client process
on the same machine, whose work counts against it: once with `stream_interval: 1`, once with the default, "auto".
Time counts once the server rests: its spare engine process has done its imports then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import common


def engine_options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": common.checkpoint(arguments["dtype"]),
        "dtype": arguments["dtype"],
        "max_num_seqs": 32,
        "cpu_threads": arguments["threads"],
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
    }


def run_in_process(arguments: dict[str, Any]) -> dict[str, Any]:
    from inflight.config import EngineConfig
    from inflight.engine.assembly import make_core
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams
    from inflight.runner.pipeline import make_runner

    config = EngineConfig.from_dict(engine_options(arguments))
    core = make_core(config, make_runner(config))

    def run(requests: list[dict[str, Any]]) -> int:
        for request in requests:
            params = SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True)
            assert core.add_request(AddRequest(request["id"], request["prompt"], params)) is None
        count = 0
        while core.has_work:
            count += sum(len(delta.token_ids) for delta in core.step().deltas)
        return count

    requests = common.workload(arguments["requests"])
    run([{**request, "prompt": request["prompt"][:16], "out": 4} for request in requests[:8]])
    start = time.perf_counter()
    tokens = run(requests)
    seconds = time.perf_counter() - start
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}


def run_through_triton(arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    from inflight_tools.launcher import TritonServer

    requests = common.workload(arguments["requests"])
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "bench" / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps({**engine_options(arguments), **options}))
        (version.parent / "config.pbtxt").write_text('backend: "inflight"\n')
        with TritonServer(folder) as server:
            stream_all(server.grpc_address, [{**r, "prompt": r["prompt"][:16], "out": 4} for r in requests[:8]])
            wait_for_rest(server)
            start = time.perf_counter()
            tokens, times = stream_all(server.grpc_address, requests)
            seconds = time.perf_counter() - start
    gaps = sorted(1e3 * (b - a) for own in times for a, b in pairwise(own))
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "responses": sum(map(len, times)),
        "gap_ms": {f"p{percent}": gaps[len(gaps) * percent // 100] for percent in (50, 90, 99)},
    }


def wait_for_rest(server: Any) -> None:
    """Until the server's processes, the spare engine among them, compute for less than a tenth of a second."""
    from inflight_tools.processes import session_members

    for _ in range(60):
        pids = session_members(server.process.pid)
        before = sum(map(cpu_seconds, pids))
        time.sleep(1.0)
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
        if "inflight-spare" in names and sum(map(cpu_seconds, pids)) - before < 0.1:
            return
    raise RuntimeError("the server computes without requests, or has no spare engine process")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stream_all(address: str, requests: list[dict[str, Any]]) -> tuple[int, list[list[float]]]:
    """Submit all requests at once on one bidirectional stream; returns their tokens, and when responses came."""
    import numpy as np
    import tritonclient.grpc as triton

    done = threading.Event()
    left, tokens, failures = len(requests), 0, []
    times: list[list[float]] = [[] for _ in requests]

    def receive(result: Any, error: Exception | None) -> None:
        nonlocal left, tokens
        if error is not None:
            failures.append(error)
            done.set()
            return
        times[int(result.get_response().id)].append(time.perf_counter())
        tokens += int(result.as_numpy("num_output_tokens").sum())
        if result.get_response().parameters["triton_final_response"].bool_param:
            left -= 1
            if not left:
                done.set()

    def tensor(name: str, kind: str, value: Any) -> Any:
        array = np.asarray(value, dtype={"INT64": np.int64, "BOOL": bool, "BYTES": object}[kind])
        result = triton.InferInput(name, array.shape, kind)
        result.set_data_from_numpy(array)
        return result

    with triton.InferenceServerClient(address) as client:
        client.start_stream(receive)
        for number, request in enumerate(requests):
            params = {"temperature": 0, "max_tokens": request["out"], "ignore_eos": True}
            inputs = [
                tensor("input_ids", "INT64", request["prompt"]),
                tensor("stream", "BOOL", [True]),
                tensor("sampling_parameters", "BYTES", [json.dumps(params).encode()]),
                tensor("return_num_output_tokens", "BOOL", [True]),
                tensor("return_token_ids", "BOOL", [True]),
            ]
            client.async_stream_infer("bench", inputs, request_id=str(number), enable_empty_final_response=True)
        done.wait()
        client.stop_stream()
    if failures:
        raise failures[0]
    assert tokens == sum(request["out"] for request in requests)
    return tokens, times


SIDES = {
    "in-process": run_in_process,
    "every token": partial(run_through_triton, stream_interval=1),
    "tritonserver + gRPC": run_through_triton,
}


if __name__ == "__main__" and "--frontends" in sys.argv:
    import frontends

    frontends.main()
elif __name__ == "__main__":
    common.compare(__file__, __doc__.splitlines()[0], SIDES)
