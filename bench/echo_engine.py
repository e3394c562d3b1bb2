#!/usr/bin/env python3
"""An engine process without a model, whose steps take `--step-ms`: the scheduler and the pipes are the real ones.

Started as `python_executable` of `model.json`, with the arguments of the real engine process.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue

import msgspec

from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.frontend_channels import Frontend, Frontends, Inbox, accept_into, read_into
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.heartbeat_listener import HeartbeatListener
from inflight.engine.messages import EngineReady
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.worker import Engine, serve, settle_garbage_collector
from inflight_tools.simulator.engine import SimulatedInfo

TOKEN = 300  # of the demo model's vocabulary: a few letters


class IdleRunner:
    info = SimulatedInfo(max_model_len=2048, vocab_size=2560, num_blocks=8192, eos_token_ids=[0])
    draft_runner = None
    num_collected_first = 0

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def launch(self, out: SchedulerOutput) -> StepOutput:
        now = time.monotonic()
        return StepOutput(token_ids=[TOKEN] * len(out.slots), started=now, ended=now)

    def collect(self, ticket: StepOutput) -> StepOutput:
        time.sleep(self._step_seconds)
        return ticket


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--device", default="cpu", help="where it says that it computes")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--shared", action="store_true")
    args = parser.parse_known_args()[0]
    connection = Connection(args.fd)
    owner = Frontend(0, connection)
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
    heartbeat = Heartbeat(args.heartbeat_fd, config.max_num_seqs)
    core = make_core(config, IdleRunner(args.step_ms / 1e3), listeners=[HeartbeatListener(heartbeat)])
    info = IdleRunner.info
    ready = EngineReady(
        info.max_model_len,
        info.vocab_size,
        info.eos_token_ids,
        info.num_blocks,
        config.block_size,
        "none",
        args.device,
        "none",
        0.0,
    )
    if args.shared:
        owner.send(ready)
    settle_garbage_collector()
    inbox: Inbox = SimpleQueue()
    reads = accept_into if args.shared else read_into
    threading.Thread(target=reads, args=(inbox, owner, connection), daemon=True).start()
    serve(Engine(core, None), Frontends(core.live_ids, ready), inbox, heartbeat)


if __name__ == "__main__":
    main()
    os._exit(0)
