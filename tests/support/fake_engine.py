"""An engine process without a model: it echoes the prompt's tokens, one per step and sequence.

Started like the real one (`--fd N`, `--fork-server`).  A request's `tenant` can contain orders, separated by commas:

    crash=3     kill the process with SIGKILL once the request has three tokens
    nonsense=3  send an invalid frame then
    hang=3      do nothing from then on
    stop=3      stop the process (SIGSTOP) then; it runs again when a test continues it
    fail=3      report EngineFailed and exit with status 1 then
    giveup=3    give up the request in a StepMessage then
    delay=0.05  seconds that each step takes while the request runs
    run=4       tokens per step
    hold=3      no more than three tokens until the control file has `go`
    pause=3     likewise, but of each engine process: the next one makes three more
    follow=3    likewise, but beside a request that is not held it makes more
    refuse=CODE answer RequestFailed with that code

Each abort is appended as a line to the file named by `$FAKE_ENGINE_LOG`, if set.  The JSON file named
by `$FAKE_ENGINE_CONTROL`, if it exists, is read at each start, for each question, and while a request is held:

    {"start": "fail" | "fatal" | "exit" | "hang", "answer": "never" | "error" | "crash", "go": ""}

With `--fork-server`, `$FAKE_ENGINE_THREADS` is the number of threads that it has when it is asked to fork, and with
`$FAKE_ENGINE_NO_PIDFD` the system gives it no pidfd.  With `$FAKE_ENGINE_OUTDATED` it says that it is outdated, unless
it was started with `--idle`.

Imports nothing of the engine but its messages, its heartbeat and the fork server.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from inflight.config import EngineConfig
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    Answer,
    Ask,
    EngineFailed,
    EngineReady,
    Shutdown,
    StepMessage,
    decode_to_engine,
    encode,
)
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.fork_server import serve_forks

VOCAB_SIZE = 2560
EOS = 0
MAX_MODEL_LEN = 2048
_MAX_FRONTENDS = 4
_LONG = 600  # seconds: longer than any test waits


def orders(tenant: str) -> dict[str, str]:
    return dict(order.split("=", 1) for order in tenant.split(",") if "=" in order)


def echo(prompt: list[int], count: int) -> list[int]:
    """The engine's output for a prompt: its tokens without special ones, over and over."""
    source = [token for token in prompt if token > 2] or [5]
    return [source[k % len(source)] for k in range(count)]


def control() -> dict[str, str]:
    path = os.environ.get("FAKE_ENGINE_CONTROL")
    try:
        return json.loads(Path(path).read_text()) if path else {}
    except FileNotFoundError:
        return {}


class FakeSequence:
    def __init__(self, request: AddRequest, index: int) -> None:
        self.request = request
        self.index = index
        self.orders = orders(request.tenant)
        room = MAX_MODEL_LEN - len(request.prompt_token_ids)
        self.tokens = echo(request.prompt_token_ids, min(request.params.max_tokens, room))
        given = request.output_token_ids[index] if request.output_token_ids else []
        assert given is not None
        self.done = self.start = len(given)
        leads = index == next((k for k, ids in enumerate(request.output_token_ids) if ids is not None), 0)
        wants_prompt = leads and request.params.prompt_logprobs is not None
        prompt = request.prompt_token_ids
        self.prompt_entries = [[], *([(p, -2.0, 3)] for p in prompt[1:])] if wants_prompt else None

    @property
    def is_at_its_limit(self) -> bool:
        given = {"hold": 0, "pause": self.start, "follow": self.start}
        limits = [int(self.orders[name]) + count for name, count in given.items() if name in self.orders]
        return any(self.done >= limit for limit in limits)

    def step(self) -> SequenceDelta:
        """As the real engine's: a prompt's log probabilities come chunk by chunk, with the first sequence that runs."""
        params, entries = self.request.params, self.prompt_entries
        if entries is not None and len(entries) > 2:
            self.prompt_entries = entries[2:]
            part = Logprobs.of(entries[:2])
            return SequenceDelta(self.request.request_id, self.index, [], prompt_logprobs=part)
        run = self.tokens[self.done : self.done + int(self.orders.get("run", 1))]
        stop = next((k for k, token in enumerate(run) if token in params.stop_token_ids), None)
        run = run if stop is None else run[: stop + 1]
        first = self.done == self.start
        self.done += len(run)
        finish = "stop" if stop is not None else "length" if self.done == len(self.tokens) else None
        logprobs = [[(token, -0.5, 1), (7, -1.5, 2)][: 1 + (params.logprobs or 0)] for token in run]
        self.prompt_entries, prompt_entries = None, self.prompt_entries
        return SequenceDelta(
            self.request.request_id,
            self.index,
            run,
            finish,
            None if stop is None else run[-1],
            None if params.logprobs is None else Logprobs.of(logprobs),
            None if prompt_entries is None else Logprobs.of(prompt_entries),
            0 if first else None,
        )


class FakeEngine:
    """The engine as one frontend sees it.

    Args:
        owner: receives messages about the process: the frontend, or the daemon of a shared engine.
        slots: of the heartbeat, for this frontend's sequences.
    """

    def __init__(
        self, connection: Connection, owner: Connection, slots: range, heartbeat: Heartbeat, leads: bool = True
    ) -> None:
        self.connection = connection
        self.owner = owner
        self.slots = slots
        self.heartbeat = heartbeat
        self.leads = leads
        self.running: list[FakeSequence] = []

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
                given = message.output_token_ids or [[]] * message.params.n
                self.running += [FakeSequence(message, k) for k, tokens in enumerate(given) if tokens is not None]
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
        elif isinstance(message, Ask):
            self.answer(message)
        return True

    def answer(self, ask: Ask) -> None:
        """Answer with the question's id, or as the control file orders."""
        order = control().get("answer")
        if order == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "error":
            self.send(Answer(ask.question_id, error=("INVALID_ARG", "told to refuse")))
        elif order != "never":
            self.send(Answer(ask.question_id, f"answer {ask.question_id}".encode()))

    def report(self, deltas: list[SequenceDelta], batch: int, failed: Iterable[RequestFailed] = ()) -> None:
        used = len(self.running)
        stats = StepStats(used, 0, 0, used, 1000 - used, 10, 5, batch, batch, batch, 0.001)
        self.send(StepMessage(deltas, stats, failed=list(failed), leads=self.leads))

    def step(self) -> None:
        batch = [sequence for sequence in self.running if not sequence.is_at_its_limit]
        if len(batch) < len(self.running) and "go" in control():
            batch = self.running
        if not batch:
            time.sleep(0.002)
            return
        batch = [sequence for sequence in self.running if sequence in batch or "follow" in sequence.orders]
        self.heartbeat.launched(
            SchedulerOutput(
                num_tokens=len(batch),
                preempted=list(self.slots),
                new_rows=[
                    NewRow(slot, sequence.request.request_id, sequence.index, b"", 0, [], sequence.request.params, 0)
                    for slot, sequence in zip(self.slots, batch)
                ],
            )
        )
        for sequence in batch:
            due = {name for name, value in sequence.orders.items() if value == str(sequence.done)}
            if "crash" in due:
                os.kill(os.getpid(), signal.SIGKILL)
            if "stop" in due:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread makes no more tokens
            if "hang" in due:
                time.sleep(_LONG)
            if "nonsense" in due:
                self.connection.send_bytes(b"nonsense")
                time.sleep(_LONG)
            if "fail" in due:
                self.owner.send_bytes(encode(EngineFailed("engine step failed: told to")))
                os._exit(1)
        time.sleep(max(float(s.orders.get("delay", 0)) for s in batch))
        given_up = {s.request.request_id for s in batch if s.orders.get("giveup") == str(s.done)}
        deltas = [sequence.step() for sequence in batch if sequence.request.request_id not in given_up]
        ended = {(d.request_id, d.index) for d in deltas if d.finish_reason}
        self.running = [
            s
            for s in self.running
            if s.request.request_id not in given_up and (s.request.request_id, s.index) not in ended
        ]
        failed = [RequestFailed(request_id, "UNAVAILABLE", "waited too long") for request_id in given_up]
        self.report(deltas, len(batch), failed)

    def serve(self) -> None:
        while True:
            self.heartbeat.beat(len(self.running))
            while not self.running or self.connection.poll(0):
                if not self.connection.poll(1):
                    self.heartbeat.beat(len(self.running))
                elif not self.take(decode_to_engine(self.connection.recv_bytes())):
                    return
            self.step()


def serve_all(owner: Connection, ready: EngineReady, slots: int, heartbeat: Heartbeat) -> None:
    """Each frontend that the owner sends, in a thread of its own; the first one leads."""
    count = 0
    with socket.socket(fileno=os.dup(owner.fileno())) as pipe:
        while True:
            number, descriptors, _, _ = socket.recv_fds(pipe, 4, 1)
            if not number:
                return
            share = slots // _MAX_FRONTENDS
            its_slots = range(count % _MAX_FRONTENDS * share, (count % _MAX_FRONTENDS + 1) * share)
            ready = msgspec.structs.replace(ready, leads=not count)
            engine = FakeEngine(Connection(descriptors[0]), owner, its_slots, heartbeat, leads=not count)
            threading.Thread(target=serve_one, args=(engine, ready), daemon=True).start()
            count += 1


def serve_one(engine: FakeEngine, ready: EngineReady) -> None:
    with contextlib.suppress(EOFError, OSError):
        engine.send(ready)
        engine.serve()


def prepare(connection: Connection) -> None:
    """As the imports of the real one; some leave threads, and some sandboxes allow no pidfd."""
    connection.recv_bytes()
    for _ in range(int(os.environ.get("FAKE_ENGINE_THREADS", "0"))):
        threading.Thread(target=time.sleep, args=(_LONG,), daemon=True).start()
    if "FAKE_ENGINE_NO_PIDFD" in os.environ:
        os.pidfd_open = forbidden


def is_outdated(argv: list[str]) -> bool:
    """As a spare process that was made before weights were kept; its successor is not."""
    return "FAKE_ENGINE_OUTDATED" in os.environ and "--idle" not in argv


def forbidden(pid: int, flags: int = 0) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int)
    parser.add_argument("--fork-server", action="store_true")
    parser.add_argument("--shared", action="store_true")
    args = parser.parse_known_args()[0]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fd, heartbeat_fd = args.fd, args.heartbeat_fd
    if args.fork_server:
        with socket.socket(fileno=os.dup(fd)) as forks:
            forked = serve_forks(forks, lambda: prepare(Connection(fd)), lambda: is_outdated(sys.argv))
        if forked is None:
            return 0
        fd, heartbeat_fd = forked
    connection = Connection(fd)
    try:
        config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
        start = control().get("start")
        if start == "exit":
            return 7
        if start == "hang":
            time.sleep(_LONG)
        if start in ("fail", "fatal"):
            connection.send_bytes(encode(EngineFailed(f"told to {start}", fatal=start == "fatal")))
            return 1
        ready = EngineReady(MAX_MODEL_LEN, VOCAB_SIZE, [EOS], 1000, config.block_size, "float32", "cpu", "fake", 0.01)
        connection.send_bytes(encode(ready))
        slots = config.max_num_seqs
        heartbeat = Heartbeat(heartbeat_fd, slots)
        if args.shared:
            serve_all(connection, ready, slots, heartbeat)
        else:
            FakeEngine(connection, connection, range(slots), heartbeat).serve()
    except (EOFError, OSError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
