"""The responder over a stand-in for Triton's response sender (the real one: tests/e2e)."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import numpy as np
import pytest


@pytest.fixture
def bridge(monkeypatch):
    pb_utils = types.ModuleType("triton_python_backend_utils")
    pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    pb_utils.Tensor = lambda name, array: (name, array)
    pb_utils.InferenceResponse = lambda tensors=None, error=None: (tensors, error)
    pb_utils.TritonError = lambda message, code: (message, code)
    pb_utils.TritonError.CANCELLED = 7
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    monkeypatch.delitem(sys.modules, "inflight.frontend.triton_bridge", raising=False)
    yield importlib.import_module("inflight.frontend.triton_bridge")
    sys.modules.pop("inflight.frontend.triton_bridge", None)


class Server:
    """The server's side of a request: its response factory is gone once FINAL came."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.flags: list[int] = []
        self.asked_after_final = False

    def is_cancelled(self) -> bool:
        self.asked.set()
        assert self.answer.wait(10)
        self.asked_after_final |= 1 in self.flags
        return False

    def send(self, response, flags: int) -> None:
        self.flags.append(flags)


@pytest.mark.parametrize("end", ["send", "fail"])
def test_final_waits_for_a_question_that_is_on_its_way(bridge, end):
    server = Server()
    responder = bridge.TritonResponder(server)
    question = threading.Thread(target=responder.is_cancelled)
    question.start()
    assert server.asked.wait(10)
    outputs = {"text_output": np.array([b"x"], dtype=np.object_)}
    responder.send(outputs, final=False)  # the factory lives on: nothing to wait for
    final = threading.Thread(
        target=lambda: responder.send(outputs, True) if end == "send" else responder.fail("CANCELLED", "gone")
    )
    final.start()
    final.join(0.1)
    assert final.is_alive()
    assert server.flags == [0]
    server.answer.set()
    question.join(10)
    final.join(10)
    assert server.flags == [0, 1]
    assert not server.asked_after_final


def test_nobody_asks_after_final(bridge):
    server = Server()
    server.answer.set()
    responder = bridge.TritonResponder(server)
    responder.fail("CANCELLED", "gone")
    assert responder.is_cancelled() is False
    assert not server.asked.is_set()
