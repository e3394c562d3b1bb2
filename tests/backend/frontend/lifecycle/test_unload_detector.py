"""Signs of an unload, and the state that other processes see."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.frontend.lifecycle import server_probe, unload_detector
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.lifecycle.instance_registry import RegistryEntry, children_of, states_of
from inflight.frontend.lifecycle.server_probe import ServerProbe, listening_addresses
from inflight.frontend.lifecycle.unload_detector import UnloadDetector


class OutputProcessor:
    num_open = 1

    def refuse_new(self, make_error: Any) -> None: ...
    def end_all(self, error: Any) -> None: ...


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unload_detector, "_PERIOD_SECONDS", 0.005)
        self.streams = OutputProcessor()
        # Test processes are siblings: with one name they would find, and end, each other.
        self.page = RegistryEntry(f"a-model-{os.getpid()}")
        self.drain = Drain(self.streams, 60.0, lambda level, line: None, self.page.set)
        self.can_serve, self.answers, self.asked = True, iter([True] * 3), threading.Event()
        self.detector = UnloadDetector(
            self.drain, self.page, lambda: self.streams.num_open, lambda: self.can_serve, self.is_ready
        )

    def is_ready(self) -> bool | None:
        found = next(self.answers, "over")
        if found == "over":
            self.asked.set()
            return True
        return found

    def start(self, *answers: bool | None) -> None:
        self.answers = iter(answers)
        self.detector.start()
        assert self.asked.wait(20) or self.drain.draining


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    rig = Rig(monkeypatch)
    yield rig
    rig.detector.stop()
    rig.drain.stop()
    rig.page.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def state(pid: int) -> list[str]:
    return [entry.state for entry in states_of(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_whatever_the_main_thread_does(rig: Rig, number: signal.Signals) -> None:
    rig.streams.num_open = 0
    rig.detector.start()
    os.kill(os.getpid(), number)
    for _ in range(1000):
        if rig.drain.draining:
            break
        threading.Event().wait(0.01)
    assert rig.drain.draining


def test_three_refusals_in_a_row_drain_and_fewer_do_not(rig: Rig) -> None:
    rig.start(False, False, True, False, None, False, True, False, False)
    assert not rig.drain.draining


def test_a_server_that_refuses_again_and_again_is_going(rig: Rig) -> None:
    rig.detector.start()
    rig.answers = iter([False] * 50)
    for _ in range(1000):
        if rig.drain.draining:
            break
        threading.Event().wait(0.01)
    assert rig.drain.draining and state(os.getpid())[-1] == "draining"


def test_an_idle_instance_asks_before_its_first_request_so_that_it_knows_the_address(rig: Rig) -> None:
    rig.streams.num_open = 0
    rig.start()
    assert rig.asked.is_set() and not rig.drain.draining


def test_its_own_no_is_no_sign(rig: Rig) -> None:
    rig.can_serve = False
    rig.detector.start()
    threading.Event().wait(0.1)
    assert not rig.drain.draining


def test_a_page_shows_the_state_while_it_is_open() -> None:
    page = RegistryEntry("one")
    names = [entry.name for entry in states_of(os.getpid())]
    assert page.name in names
    page.set("draining")
    assert "draining" in state(os.getpid())
    page.close()
    page.set("drained")  # does nothing
    assert page.name not in [entry.name for entry in states_of(os.getpid())]
    assert list(states_of(2**22 + 1)) == []


def test_a_successor_finds_only_the_instances_that_it_replaces() -> None:
    program = (
        "import sys\nfrom inflight.frontend.lifecycle.instance_registry import RegistryEntry\n"
        "page = RegistryEntry(sys.argv[1])\nprint('up', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    old, other = (
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for name in ("demo", "else")
    )
    find = (
        "import sys, os\nfrom inflight.frontend.lifecycle.instance_registry import RegistryEntry\n"
        "print(RegistryEntry('demo').predecessors(), flush=True)"
    )
    try:
        for process in (old, other):
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert {old.pid, other.pid} <= set(children_of(os.getpid()))
        found = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == str([old.pid])
    finally:
        for process in (old, other):
            process.communicate(b"")


class Handler(http.server.BaseHTTPRequestHandler):
    """Triton's HTTP service: knows its paths, and one model."""

    status = 200

    def do_GET(self) -> None:
        known = {"/v2/health/live": 200, "/v2/models/a%20model/versions/1/ready": type(self).status}
        self.send_response(known.get(self.path, 400))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


class YesHandler(Handler):
    """Triton's metrics service: 200 to every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_the_probe_does_not_take_the_metrics_service_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (YesHandler, Handler)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    addresses = [server.server_address[:2] for server in servers]
    monkeypatch.setattr("inflight.frontend.lifecycle.server_probe.listening_addresses", lambda pid: addresses)
    monkeypatch.setattr(server_probe, "_SECONDS", 60.0)
    monkeypatch.setattr(Handler, "status", 400)
    assert ServerProbe("a model", "1", os.getpid()).is_ready() is False
    monkeypatch.setattr(Handler, "status", 403)
    assert ServerProbe("a model", "1", os.getpid()).is_ready() is None, "an operator restricts the question"
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_probe_finds_the_server_and_knows_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "_SECONDS", 60.0)
    quiet = socket.create_server(("127.0.0.1", 0))  # listens, and is no server
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    assert {quiet.getsockname()[:2], server.server_address[:2]} <= set(listening_addresses(os.getpid()))
    quiet.close()
    probe = ServerProbe("a model", "1", os.getpid())
    assert probe.is_ready() is True
    Handler.status = 400
    assert probe.is_ready() is False
    Handler.status = 200
    server.shutdown()
    server.server_close()
    assert probe.is_ready() is False, "no socket listens any more"
    assert ServerProbe("a model", "1", 2**22 + 1).is_ready() is None, "no such process"
