"""The engine process over its pipe, with a real tiny checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import msgspec
import pytest
from checkpoints import greedy_reference, make_checkpoint

from inflight.config import EngineConfig
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    RequestFailed,
    Shutdown,
    StepMessage,
    decode_to_frontend,
    encode,
)
from inflight.engine.request import SamplingParams


class Engine:
    """A running engine process and our end of its pipe."""

    def __init__(self, **options):
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "inflight.worker", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.pipe = Connection(ours.detach())
        config = EngineConfig.from_dict({"device": "cpu", "kv_cache_memory": "16MiB", **options})
        self.pipe.send_bytes(msgspec.msgpack.encode(config))

    def send(self, message):
        self.pipe.send_bytes(encode(message))

    def receive(self, timeout=60.0):
        assert self.pipe.poll(timeout), "the engine said nothing"
        return decode_to_frontend(self.pipe.recv_bytes())

    def close(self):
        self.pipe.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("process"))


@pytest.fixture
def engine(checkpoint):
    engine = Engine(model=checkpoint, max_queue_size=1, max_num_seqs=2)
    yield engine
    engine.close()


def test_generates_aborts_refuses_and_shuts_down(engine, checkpoint):
    ready = engine.receive()
    assert isinstance(ready, EngineReady)
    assert (ready.vocab_size, ready.max_model_len, ready.block_size) == (199, 256, 16)

    prompt = list(range(1, 20))
    engine.send(AddRequest(1, prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    tokens, reason = [], None
    while reason is None:
        message = engine.receive()
        assert isinstance(message, StepMessage)
        for delta in message.deltas:
            tokens += delta.token_ids
            reason = delta.finish_reason
    assert tokens == greedy_reference(checkpoint, [prompt], [20])[0]
    assert reason == "length"

    engine.send(AddRequest(2, [9999], SamplingParams()))
    refused = engine.receive()
    assert isinstance(refused, RequestFailed)
    assert (refused.request_id, refused.code) == (2, "INVALID_ARG")

    engine.send(AddRequest(3, prompt, SamplingParams(max_tokens=200, ignore_eos=True)))
    engine.receive()
    engine.send(AbortRequest(3))
    while engine.receive().stats.blocks_used:
        pass
    engine.send(Shutdown())
    assert engine.process.wait(timeout=20) == 0


def test_ends_when_its_frontend_is_gone(engine):
    engine.receive()
    engine.send(AddRequest(1, [1, 2], SamplingParams(max_tokens=250, ignore_eos=True)))
    engine.receive()
    engine.pipe.close()
    assert engine.process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such/folder"}, "is not a readable checkpoint"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the checkpoint's 256 positions"),
        ({"kv_cache_memory": "1KiB"}, "more; raise kv_cache_memory, or set max_model_len to at most"),
        ({"attention_backend": "magic"}, "attention_backend='magic' is not one of"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_reported_and_fatal(checkpoint, options, message):
    engine = Engine(**{"model": checkpoint, **options})
    try:
        failed = engine.receive()
        assert isinstance(failed, EngineFailed)
        assert failed.fatal
        assert message in failed.message
        assert engine.process.wait(timeout=20) == 1
    finally:
        engine.close()
