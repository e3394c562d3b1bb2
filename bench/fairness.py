#!/usr/bin/env python3
"""The effect of one valid request on another: a short canary beside expensive requests and beside plain ones.

    python bench/fairness.py [--rounds 3] [--only logprobs --only n] [--list] [--output FILE]

A real tritonserver serves the demo model.  The canary is a streamed request of 32 tokens; canaries run back to back,
alone, and while a neighbour is served: an expensive request, or the same one without what makes it expensive.  A
run's figures are its slowest canary and its slowest first token, and the ratios compare medians over alternating runs.
The neighbour's client is a process of its own, so that what it receives delays no canary in Python.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import serving

REPOSITORY = common.HERE.parent / "model_repository"
PROMPT = "The json module"
CANARY = {"text_input": "How to read a file", "sampling": {"max_tokens": 32, "temperature": 0, "ignore_eos": True}}
NUM_CANARIES = 5
WIDTH = 48  # sequences of a neighbour
TOKENS = 384  # of each
CONTEXT = 2040

# Inputs as `serving.tensors` takes them; with "slow", the request is sent over HTTP and its answer is not read.
Request = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Attributes:
    expensive, plain: what is compared; each request is one of the neighbour's.  Without a plain one, the expensive
        requests are compared with nothing.
    """

    expensive: list[Request]
    plain: list[Request]


def request(inputs: dict[str, Any] | None = None, **sampling: Any) -> Request:
    base = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"text_input": PROMPT, **(inputs or {}), "sampling": {**base, **sampling}}


def words(count: int, longest: int) -> list[str]:
    """Distinct strings that no output contains."""
    rng = random.Random(count)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=longest - 5)) + f"{number:05}" for number in range(count)]


def pair(plain: Request, times: int = 1, inputs: dict[str, Any] | None = None, **more: Any) -> Kind:
    """`plain`, and the same with more."""
    expensive = {**plain, **(inputs or {}), "sampling": {**plain["sampling"], **more}}
    return Kind([expensive] * times, [plain] * times)


def kinds() -> dict[str, Kind]:
    """Name -> what runs beside the canary.  Requests are valid with the default limits."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(REPOSITORY / "demo" / "1" / "checkpoint" / "tokenizer.json"))
    rng = random.Random(0)
    long_prompts = [[rng.randrange(3, 2560) for _ in range(CONTEXT)] for _ in range(8)]
    letter = tokenizer.token_to_id("a")
    byte = tokenizer.token_to_id("\u0122")  # 0x80, as byte-level tokenizers write it: alone it is no character
    shows = {"return_logprobs": True}
    wide = request(n=WIDTH, temperature=1.0, seed=1)
    letters = request(n=WIDTH, allowed_token_ids=[letter])
    prompts = [request({"text_input": None, "input_ids": prompt}, max_tokens=8) for prompt in long_prompts]
    text = " ".join(words(3000, 30))

    def shown(one: Request) -> Request:
        return {**one, "return_prompt_logprobs": True, "sampling": {**one["sampling"], "prompt_logprobs": 100}}

    all_at_once = dict(logprobs=100, stop=words(1024, 60), bad_words=words(1024, 40), stop_token_ids=list(range(1000)))
    return {
        "n": pair(request(temperature=1.0, seed=1), n=WIDTH),
        "stop": pair(wide, stop=words(1024, 60)),
        "stop_near": pair(letters, stop=["a" * 63 + word for word in words(900, 8)]),
        "bad_words": pair(wide, bad_words=words(1024, 60)),
        "logprobs": pair(wide, inputs=shows, logprobs=100),
        "logprobs_late": pair({**wide, "stream": False}, inputs=shows, logprobs=100),
        "prompts": Kind(prompts, []),
        "prompt_logprobs": Kind([shown(one) for one in prompts], prompts),
        "allowed_ids": pair(wide, allowed_token_ids=list(range(3, 2500))),
        "logit_bias": pair(wide, logit_bias={str(i): 0.5 for i in range(3, 2500)}),
        "stop_ids": pair(wide, stop_token_ids=list(range(1, 1025)), min_tokens=TOKENS),
        "penalties": pair(wide, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        "broken_text": Kind([request(n=WIDTH, allowed_token_ids=[byte])], [letters]),
        "long_text": Kind([request({"text_input": text}, max_tokens=8, truncate_prompt_tokens=CONTEXT)] * 8, prompts),
        "slow_reader": Kind([{**wide, "slow": True}], [wide]),
        "together": pair(wide, inputs=shows, **all_at_once),
    }


# -- the clients ---------------------------------------------------------------------------


def open_without_reading(address: str, wanted: Request) -> socket.socket:
    """A server-sent-events request whose answer stays in the socket."""
    host, port = address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    body = json.dumps({"text_input": wanted["text_input"], "stream": True, **wanted["sampling"]}).encode()
    head = f"POST /v2/models/demo/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def be_neighbour(end: Connection, grpc_address: str, http_address: str) -> None:
    """The neighbour's process: requests in, "sent" and "done" or "error ..." out; "stop" cancels them: "stopped"."""
    while True:
        requests = end.recv()
        slow = [open_without_reading(http_address, wanted) for wanted in requests if wanted.get("slow")]
        quick = [wanted for wanted in requests if not wanted.get("slow")]
        stream = serving.Streams(grpc_address, "demo")
        for wanted in quick:
            stream.submit(wanted)
        end.send("sent")
        if not slow:
            threading.Thread(target=_report, args=(end, stream, len(quick)), daemon=True).start()
        end.recv()
        for connection in slow:
            connection.close()
        stream.close()
        end.send("stopped")


def _report(end: Connection, stream: serving.Streams, count: int) -> None:
    try:
        stream.wait(count)
        end.send("done")
    except Exception as error:
        if "cancelled" not in str(error).lower():
            end.send(f"error {error}")


class Neighbour:
    """The other end of `be_neighbour`."""

    def __init__(self, server: Any) -> None:
        context = get_context("spawn")
        self._end, other = context.Pipe()
        addresses = server.grpc_address, server.http_address
        self._process = context.Process(target=be_neighbour, args=(other, *addresses), daemon=True)
        self._process.start()
        self._done = False

    def _read(self) -> str:
        said: str = self._end.recv()
        if said.startswith("error"):
            raise RuntimeError(f"a neighbour's request failed: {said}")
        self._done = self._done or said == "done"
        return said

    @property
    def done(self) -> bool:
        """Whether its requests have ended."""
        while self._end.poll():
            self._read()
        return self._done

    def start(self, requests: list[Request]) -> None:
        self._done = False
        self._end.send(requests)
        while self._read() != "sent":
            pass

    def stop(self) -> None:
        self._end.send("stop")
        while self._read() != "stopped":
            pass

    def close(self) -> None:
        self._process.kill()
        self._process.join()


# -- measurement ---------------------------------------------------------------------------


class Memory:
    """Peak resident memory of the server's processes, in MiB, since the last `reset`."""

    def __init__(self, server: Any) -> None:
        from inflight_tools.processes import session_members

        self._pids = {pid: serving.kind_of(pid) for pid in session_members(server.process.pid)}

    def reset(self) -> None:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts anew

    def peaks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for pid, role in self._pids.items():
            status = Path(f"/proc/{pid}/status").read_text()
            kilobytes = int(status.split("VmHWM:")[1].split()[0])
            found[role] = round(found.get(role, 0.0) + kilobytes / 1024, 1)
        return found


class Bench:
    """One server with its canary and its neighbour."""

    def __init__(self, server: Any, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._stream = serving.Streams(server.grpc_address, "demo")
        self._memory = Memory(server)
        self._num_runs = 0
        for _ in range(10):
            self.canary()
        self._usual = statistics.median(self.canary()[0] for _ in range(10))

    def canary(self) -> tuple[float, float]:
        """Seconds to its end, and to its first token."""
        start = time.perf_counter()
        answer = self._stream.submit(CANARY)
        self._stream.wait()
        return time.perf_counter() - start, answer.times[0] - start

    def _run(self, canaries: list[tuple[float, float]]) -> dict[str, Any]:
        times, firsts = (list(column) for column in zip(*canaries))
        return {
            "seconds": times,
            "slowest": max(times),
            "first_token": firsts,
            "slowest_first": max(firsts),
            "peak_mib": self._memory.peaks(),
        }

    def alone(self) -> dict[str, Any]:
        self._memory.reset()
        return self._run([self.canary() for _ in range(NUM_CANARIES)])

    def beside(self, requests: list[Request]) -> dict[str, Any]:
        """Canaries while the requests are served, NUM_CANARIES at most; so many alone if there are no requests."""
        if not requests:
            return self.alone()
        self._memory.reset()
        self._num_runs += 1  # no run finds its prompts in the prefix cache
        self._neighbour.start([{**wanted, "cache_salt": str(self._num_runs)} for wanted in requests])
        time.sleep(0.02)  # from the client's socket to the server
        canaries = [self.canary()]
        while len(canaries) < NUM_CANARIES and not self._neighbour.done:
            canaries.append(self.canary())
        ended = self._neighbour.done
        self._neighbour.stop()
        result = {**self._run(canaries), "ended": ended}
        self._settle()
        return result

    def _settle(self) -> None:
        """Wait until the cancelled requests are gone: three canaries in a row take about as long as alone."""
        quiet, end = 0, time.monotonic() + 30
        while quiet < 3 and time.monotonic() < end:
            quiet = quiet + 1 if self.canary()[0] < 1.5 * self._usual else 0

    def close(self) -> None:
        self._stream.close()


def measure(kind: Kind, rounds: int) -> dict[str, list[common.Run]]:
    """Alternating runs on a server of its own: what one kind leaves behind does not disturb the next one."""
    from inflight_tools.launcher import TritonServer

    server = TritonServer(REPOSITORY, model_control_mode="explicit", load_models=["demo"], exit_timeout=2)
    with server, closing(Neighbour(server)) as neighbour, closing(Bench(server, neighbour)) as bench:
        runs: dict[str, list[common.Run]] = {"alone": [], "plain": [], "expensive": []}
        for _ in range(rounds):
            runs["alone"].append(bench.alone())
            runs["plain"].append(bench.beside(kind.plain))
            runs["expensive"].append(bench.beside(kind.expensive))
    return runs


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the runs' slowest canaries and first tokens, their ratios, and the largest peak of memory, all
    processes together."""
    medians = {side: statistics.median(run["slowest"] for run in of_side) for side, of_side in runs.items()}
    firsts = {side: statistics.median(run["slowest_first"] for run in of_side) for side, of_side in runs.items()}
    peaks = {side: max(sum(run["peak_mib"].values()) for run in of_side) for side, of_side in runs.items()}
    return {
        "seconds": medians,
        "ratio": medians["expensive"] / medians["plain"],
        "first_token_seconds": firsts,
        "first_token_ratio": firsts["expensive"] / firsts["plain"],
        "peak_mib": peaks,
        "by_process": {
            role: max(run["peak_mib"].get(role, 0.0) for run in runs["expensive"])
            for role in ("server", "stub", "engine", "spare")
        },
    }


def main() -> None:
    only = dict(action="append", help="measure this kind; repeatable")
    args = common.options(__doc__, rounds=3, only=only, list=False)
    known = kinds()
    if args.list:
        return print("\n".join(known))
    unknown = set(args.only or ()) - known.keys()
    if unknown:
        sys.exit(f"--only {min(unknown)}: the kinds are {', '.join(known)}")
    runs, results = {}, {}
    print(f"{common.machine()}, medians over {args.rounds} alternating runs of the slowest of {NUM_CANARIES} canaries")
    print(
        f"{'':<16}{'alone':>9}{'plain':>9}{'expensive':>11}{'ratio':>8}{'first token':>13}{'expensive':>11}{'ratio':>8}"
        f"{'MiB alone':>11}{'plain':>8}{'expensive':>11}"
    )
    for name in args.only or known:
        runs[name] = measure(known[name], args.rounds)
        result = results[name] = summary(runs[name])
        seconds, firsts, peaks = result["seconds"], result["first_token_seconds"], result["peak_mib"]
        print(
            f"{name:<16}{seconds['alone']:>8.3f}s{seconds['plain']:>8.3f}s{seconds['expensive']:>10.3f}s"
            f"{result['ratio']:>8.2f}{firsts['plain']:>12.3f}s{firsts['expensive']:>10.3f}s"
            f"{result['first_token_ratio']:>8.2f}{peaks['alone']:>11.0f}{peaks['plain']:>8.0f}{peaks['expensive']:>11.0f}",
            flush=True,
        )
    common.record(args, runs, results=results)


if __name__ == "__main__":
    main()
