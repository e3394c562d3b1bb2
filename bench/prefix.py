#!/usr/bin/env python3
"""Time to first token with a shared prefix of 2048 tokens: the first request and the next ones.

    python bench/prefix.py [--rounds 20] [--prefix 2048] [--tail 32] [--triton] [--output FILE]

Each round has a new random prefix.  The first request computes it (miss); the second has the same prefix and
another tail (hit); the third repeats the second under another `cache_salt` (salted): it must not find the
prefix, and must give the same output.  The engine is idle and takes one request at a time, so that only the
prefix differs.  With --triton the requests go to a real tritonserver on 127.0.0.1 over gRPC streaming, and
times are those of the client.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

_TOKENS = 8  # output tokens of each request
SIDES = ("miss", "hit", "salted")

# Sends a prompt under a salt; returns seconds to the first token and the output token ids.
Send = Callable[[list[int], str], tuple[float, list[int]]]


def engine_options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": common.checkpoint(arguments["dtype"]),
        "dtype": arguments["dtype"],
        "cpu_threads": arguments["threads"],
        "kv_cache_memory": "2GiB",
        "max_num_seqs": 32,
    }


def run_in_process(arguments: dict[str, Any]) -> dict[str, Any]:
    from inflight.config import EngineConfig
    from inflight.engine.assembly import make_core
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams
    from inflight.runner.pipeline import make_runner

    config = EngineConfig.from_dict(engine_options(arguments))
    core = make_core(config, make_runner(config))
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    numbers = iter(range(1, 10**9))

    def send(prompt: list[int], salt: str) -> tuple[float, list[int]]:
        start = time.perf_counter()
        assert core.add_request(AddRequest(next(numbers), prompt, params, cache_salt=salt)) is None
        first, tokens = 0.0, []
        while core.has_work:
            for delta in core.step().deltas:
                first = first or time.perf_counter() - start
                tokens += delta.token_ids
        return first, tokens

    return measure(send, arguments)


def run_through_triton(arguments: dict[str, Any]) -> dict[str, Any]:
    import tritonclient.grpc as triton

    from inflight_tools.launcher import TritonServer

    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "bench" / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps(engine_options(arguments)))
        (version.parent / "config.pbtxt").write_text('backend: "inflight"\n')
        with TritonServer(folder) as server, triton.InferenceServerClient(server.grpc_address) as client:
            receive = Receiver()
            client.start_stream(receive)

            def send(prompt: list[int], salt: str) -> tuple[float, list[int]]:
                inputs = inputs_of(prompt, salt)
                start = time.perf_counter()
                client.async_stream_infer("bench", inputs, enable_empty_final_response=True)
                first, tokens = receive.wait()
                return first - start, tokens

            result = measure(send, arguments)
            client.stop_stream()
    return result


class Receiver:
    """Callback of the gRPC stream: the current request's tokens, and when the first of them arrived."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._first: float | None = None
        self._tokens: list[int] = []
        self._failure: Exception | None = None

    def __call__(self, result: Any, error: Exception | None) -> None:
        now = time.perf_counter()
        if error is not None:
            self._failure = error
            self._done.set()
            return
        token_ids = result.as_numpy("token_ids")
        if token_ids is not None and token_ids.size:
            self._first = self._first or now
            self._tokens += token_ids.ravel().tolist()
        if result.get_response().parameters["triton_final_response"].bool_param:
            self._done.set()

    def wait(self) -> tuple[float, list[int]]:
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        assert self._first is not None
        result = self._first, self._tokens
        self._done.clear()
        self._first, self._tokens = None, []
        return result


def inputs_of(prompt: list[int], salt: str) -> list[Any]:
    import numpy as np
    import tritonclient.grpc as triton

    params = {"temperature": 0, "max_tokens": _TOKENS, "ignore_eos": True}
    values = [
        ("input_ids", "INT64", np.array(prompt)),
        ("stream", "BOOL", np.array([True])),
        ("sampling_parameters", "BYTES", np.array([json.dumps(params).encode()], dtype=object)),
        ("return_token_ids", "BOOL", np.array([True])),
        ("cache_salt", "BYTES", np.array([salt.encode()], dtype=object)),
    ]
    inputs = []
    for name, kind, array in values:
        inputs.append(triton.InferInput(name, array.shape, kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def measure(send: Send, arguments: dict[str, Any]) -> dict[str, Any]:
    """Rounds of miss, hit and salted: seconds to the first token of each, and how often hit and salted agreed."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 30_000) for _ in range(count)]

    for number in range(2):
        send(tokens(arguments["prefix"]), f"warm-up {number}")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    equal = 0
    for number in range(arguments["rounds"]):
        prefix, tails = tokens(arguments["prefix"]), [tokens(arguments["tail"]) for _ in range(2)]
        outputs = {}
        for side, prompt, salt in (
            ("miss", [*prefix, *tails[0]], ""),
            ("hit", [*prefix, *tails[1]], ""),
            ("salted", [*prefix, *tails[1]], f"round {number}"),
        ):
            first, outputs[side] = send(prompt, salt)
            seconds[side].append(first)
        equal += outputs["hit"] == outputs["salted"]
        print(f"round {number + 1}/{arguments['rounds']}  {line(seconds, -1)}", flush=True)
    return {"seconds_to_first_token": seconds, "equal_outputs": equal}


def line(seconds: dict[str, list[float]], at: int) -> str:
    return "  ".join(f"{side} {1000 * values[at]:7.1f} ms" for side, values in seconds.items())


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.set_defaults(rounds=20)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the shared prefix")
    parser.add_argument("--tail", type=int, default=32, help="tokens after the prefix")
    parser.add_argument("--triton", action="store_true", help="through tritonserver instead of in-process")
    args = parser.parse_args()
    keys = ("dtype", "rounds", "threads", "prefix", "tail", "triton")
    arguments = {key: getattr(args, key) for key in keys}
    result = run_through_triton(arguments) if args.triton else run_in_process(arguments)
    seconds = result["seconds_to_first_token"]
    medians = {side: statistics.median(seconds[side]) for side in SIDES}
    ratios = [miss / hit for miss, hit in zip(seconds["miss"], seconds["hit"])]
    ratio = statistics.median(ratios)
    print(f"\n{common.machine()}, {args.dtype}, medians of {args.rounds}")
    for side in SIDES:
        print(f"  {side:<8} {1000 * medians[side]:8.1f} ms to the first token")
    print(f"  miss / hit, pair by pair: {ratio:.1f}; hit and salted agreed in {result['equal_outputs']} rounds")
    common.record(args.output, result, arguments, ratio=ratio, lowest_ratio=min(ratios), median_seconds=medians)


if __name__ == "__main__":
    main()
