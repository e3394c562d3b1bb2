"""An engine process without a model: it echoes the prompt's tokens, one a step and sequence.

Started like the real one (`--fd N`).  A request's `tenant` may hold orders, separated by commas:

    crash=3     kill the process with SIGKILL when the request has three tokens
    nonsense=3  send a frame that is no message then
    fail=3      report EngineFailed and exit with status 1 then
    delay=0.05  seconds each step takes while the request runs
    refuse=CODE answer RequestFailed with that code

Each abort is written as a line to the file named by `$FAKE_ENGINE_LOG`, if there is one.
The JSON file named by `$FAKE_ENGINE_CONTROL`, if there is one, is read at each start:

    {"start": "fail" | "fatal" | "exit" | "hang"}

Imports nothing of the project's engine but its messages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from inflight.config import EngineConfig
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    RequestFailed,
    SequenceDelta,
    Shutdown,
    StepMessage,
    StepStats,
    decode_to_engine,
    encode,
)

VOCAB_SIZE = 2560
EOS = 0
MAX_MODEL_LEN = 2048


def orders(tenant: str) -> dict[str, str]:
    return dict(order.split("=", 1) for order in tenant.split(",") if "=" in order)


def echo(prompt: list[int], count: int) -> list[int]:
    """What the engine answers to a prompt: its tokens again, special ones left out, in a circle."""
    source = [token for token in prompt if token > 2] or [5]
    return [source[k % len(source)] for k in range(count)]


class Sequence:
    def __init__(self, request: AddRequest, index: int) -> None:
        self.request = request
        self.index = index
        room = MAX_MODEL_LEN - len(request.prompt_token_ids)
        self.tokens = echo(request.prompt_token_ids, min(request.params.max_tokens, room))
        self.done = 0

    def step(self) -> SequenceDelta:
        params, prompt = self.request.params, self.request.prompt_token_ids
        token = self.tokens[self.done]
        self.done += 1
        stopped = token in params.stop_token_ids
        finish = "stop" if stopped else "length" if self.done == len(self.tokens) else None
        entry = [(token, -0.5, 1), (7, -1.5, 2)][: 1 + (params.logprobs or 0)]
        first = self.done == 1 and self.index == 0 and params.prompt_logprobs is not None
        return SequenceDelta(
            self.request.request_id,
            self.index,
            [token],
            finish,
            token if stopped else None,
            None if params.logprobs is None else [entry],
            [[], *([(p, -2.0, 3)] for p in prompt[1:])] if first else None,
            0 if self.done == 1 else None,
        )


class FakeEngine:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.running: list[Sequence] = []

    def send(self, message: object) -> None:
        self.connection.send_bytes(encode(message))

    def take(self, message: object) -> bool:
        """Returns False when it is time to exit."""
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, AddRequest):
            code = orders(message.tenant).get("refuse")
            if code:
                self.send(RequestFailed(message.request_id, code, f"refused with {code}"))
            else:
                self.running += [Sequence(message, index) for index in range(message.params.n)]
        elif isinstance(message, AbortRequest):
            self.running = [
                s
                for s in self.running
                if s.request.request_id != message.request_id or message.index not in (None, s.index)
            ]
            self.report([], 0)
            if log := os.environ.get("FAKE_ENGINE_LOG"):
                with open(log, "a", encoding="utf-8") as file:
                    file.write(f"abort {message.request_id} {time.monotonic()}\n")
        return True

    def report(self, deltas: list[SequenceDelta], batch: int) -> None:
        used = len(self.running)
        self.send(StepMessage(deltas, StepStats(used, 0, 0, used, 1000 - used, 10, 5, batch, batch, batch, 0.001)))

    def step(self) -> None:
        batch = list(self.running)
        for sequence in batch:
            order = orders(sequence.request.tenant)
            if sequence.done == int(order.get("crash", -1)):
                os.kill(os.getpid(), signal.SIGKILL)
            if sequence.done == int(order.get("nonsense", -1)):
                self.connection.send_bytes(b"nonsense")
                time.sleep(60)
            if sequence.done == int(order.get("fail", -1)):
                self.send(EngineFailed("engine step failed: told to"))
                sys.exit(1)
        time.sleep(max(float(orders(s.request.tenant).get("delay", 0)) for s in batch))
        deltas = [sequence.step() for sequence in batch]
        ended = {(d.request_id, d.index) for d in deltas if d.finish_reason}
        self.running = [s for s in batch if (s.request.request_id, s.index) not in ended]
        self.report(deltas, len(batch))

    def serve(self) -> None:
        while True:
            while not self.running or self.connection.poll(0):
                if not self.take(decode_to_engine(self.connection.recv_bytes())):
                    return
            self.step()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_known_args()[0].fd)
    try:
        config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
        control = Path(os.environ.get("FAKE_ENGINE_CONTROL", "/nonexistent"))
        start = json.loads(control.read_text()).get("start") if control.exists() else None
        if start == "exit":
            return 7
        if start == "hang":
            time.sleep(60)
        if start in ("fail", "fatal"):
            connection.send_bytes(encode(EngineFailed(f"told to {start}", fatal=start == "fatal")))
            return 1
        ready = EngineReady(MAX_MODEL_LEN, VOCAB_SIZE, [EOS], 1000, config.block_size, "float32", "cpu", "fake", 0.01)
        connection.send_bytes(encode(ready))
        FakeEngine(connection).serve()
    except (EOFError, OSError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
