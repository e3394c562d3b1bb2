"""Python's garbage collector in the engine process: off while it loads, out of the way while it steps."""

from __future__ import annotations

import gc
import socket
from multiprocessing.connection import Connection

import msgspec
import pytest

from inflight import worker
from inflight.config import EngineConfig


@pytest.fixture(autouse=True)
def restored():
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_it_is_off_while_the_checkpoint_is_loaded(monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "_load", lambda *args: seen.append(gc.isenabled()))
    monkeypatch.setattr(worker.signal, "signal", lambda *args: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ours, theirs = socket.socketpair()
    frontend = Connection(ours.detach())
    frontend.send_bytes(msgspec.msgpack.encode(EngineConfig(model="none")))
    assert worker.main(["--fd", str(theirs.detach())]) == 1
    assert seen == [False]


def test_once_settled_it_is_on_and_skips_long_lived_objects():
    gc.disable()
    worker.settle_garbage_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] > 2000
