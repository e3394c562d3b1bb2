"""An engine process with a real checkpoint, driven through its pipe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import msgspec

from inflight.config import EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import decode_to_frontend, encode

COMMAND = [sys.executable, "-m", "inflight.worker"]
ENV = {"OMP_NUM_THREADS": "1"}


class Worker:
    """A running engine process and our end of its pipe.

    Args:
        fork_server: forks into it; None: it is a program of its own.
    """

    def __init__(self, fork_server=None, **options):
        ours, theirs = socket.socketpair()
        config = EngineConfig.from_dict({"device": "cpu", "kv_cache_memory": "16MiB", **options})
        if fork_server is None:
            options = ["--fd", str(theirs.fileno())]
            self.process = subprocess.Popen([*COMMAND, *options], pass_fds=[theirs.fileno()], env={**os.environ, **ENV})
        else:
            page = Heartbeat.create(config.max_num_seqs)
            self.process = fork_server.fork(theirs.fileno(), page, timeout=100)
            os.close(page)
        theirs.close()
        self.pipe = Connection(ours.detach())
        self.pipe.send_bytes(msgspec.msgpack.encode(config))

    def send(self, message):
        self.pipe.send_bytes(encode(message))

    def receive(self, timeout=60.0):
        assert self.pipe.poll(timeout), "the engine sent nothing"
        return decode_to_frontend(self.pipe.recv_bytes())

    def close(self):
        self.pipe.close()
        self.process.kill()
        self.process.wait()
