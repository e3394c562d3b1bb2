"""A watch notices deaths, and recognises an ordinary unload."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.frontend.lifecycle.instance_registry import states_of
from inflight_tools import watch
from inflight_tools.processes import end_of
from inflight_tools.terminal import stop_signals
from inflight_tools.watch import Silence, wait_for_death

# Starts stubs and reaps them as it is told, like tritonserver.
PARENT = """
import subprocess, sys
stubs = []
for line in sys.stdin:
    command = line.split()
    if command[0] == "start":
        stubs.append(subprocess.Popen(command[1:], stdout=subprocess.DEVNULL))
        print(stubs[-1].pid, flush=True)
    elif command[0] == "reap":
        print(stubs.pop().wait(), flush=True)
    else:
        sys.exit(7)
"""


class Server:
    """The part of a TritonServer that a watch reads; its stubs are `sleep` under the stub's name."""

    def __init__(self, folder: Path) -> None:
        self.stub = folder / "triton_python_backend_stub"
        shutil.copy("/bin/sleep", self.stub)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def tell(self, *words: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline() or "0")

    def start_stub(self, *seconds: str) -> int:
        return self.tell("start", str(self.stub), *seconds)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


class Watched:
    """A watch that runs in a thread."""

    def __init__(self, server: Any, **options: Any) -> None:
        self.deaths: list[str] = []
        wait = lambda: self.deaths.append(wait_for_death(server, **options))  # noqa: E731
        self._thread = threading.Thread(target=wait, daemon=True)
        self._thread.start()

    def death(self) -> str:
        self._thread.join(30)
        assert self.deaths, "the watch noticed nothing"
        return self.deaths[0]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_that_comes_in_a_finaliser_is_not_lost(
    server: Server, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with stop_signals() as stop:
        Dropped()
        server.process.kill()  # the watch would return for this
        server.process.wait()
        pytest.fail(f"{wait_for_death(server, stop.check)}: the watch went on")  # type: ignore[arg-type]
    assert capsys.readouterr().err == "stopped\n"


def test_the_second_stop_signal_forces_the_end_and_later_ones_change_nothing() -> None:
    with stop_signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        stop.check_again()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a stop signal is not swallowed
        with pytest.raises(KeyboardInterrupt):
            stop.check_again()


@pytest.mark.parametrize("before", [True, False], ids=["running when the watch starts", "dead before"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_stub_that_stays_dead_is_lost(server: Server, number: signal.Signals, before: bool) -> None:
    stub = server.start_stub("600")
    watched = Watched(server) if before else None
    os.kill(stub, number)
    wait_until(lambda: end_of(stub) is not None)
    death = (watched or Watched(server)).death()
    assert death == f"the stub process of a model died ({number.name}), and its streams would hang"


def test_a_stub_that_the_server_reaps_is_not_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONFIRM_SECONDS", "_CONFIRM_EXIT_SECONDS"):
        monkeypatch.setattr(watch, name, 600.0)
    watched = Watched(server)
    for ending in ("0", "600"):  # it exits by itself; the server kills it
        stub = server.start_stub(ending)
        if ending == "600":
            os.kill(stub, signal.SIGKILL)
        server.tell("reap")
    monkeypatch.setattr(watch, "_CONFIRM_SECONDS", 0.0)
    lost = server.start_stub("600")
    os.kill(lost, signal.SIGTERM)
    assert watched.death().startswith("the stub process of a model died (SIGTERM)"), "only this one was lost"


def test_a_stub_is_not_lost_while_the_whole_machine_is_busy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server did not run either between two looks that are far apart, and could not reap it."""
    stub = server.start_stub("600")
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: end_of(stub) is not None)
    now, looks = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + 60.0, looks + 1
        if looks == 2:
            server.tell("reap")
        if looks == 6:
            server.process.kill()
            server.process.wait()

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert wait_for_death(server, stub_timeout=None).startswith("tritonserver died")  # type: ignore[arg-type]


def test_a_server_that_ends_is_noticed(server: Server) -> None:
    watched = Watched(server)
    server.start_stub("600")
    server.tell("exit")
    assert watched.death() == "tritonserver died (exit status 7)"


# A stub of the fake server: publishes beats as a model instance does, or only its entry.
BEATING = """
import sys, time
sys.path[:] = {path!r}
from inflight.frontend.lifecycle.instance_registry import RegistryEntry
entry = RegistryEntry("demo")
while True:
    entry.beat()
    time.sleep(0.01)
"""


def test_a_stub_that_is_stopped_hangs(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "beating.py"
    script.write_text(BEATING.format(path=sys.path))
    shutil.copy(sys.executable, server.stub)
    stub = server.start_stub(str(script))
    wait_until(lambda: any(states_of(stub)))
    os.kill(stub, signal.SIGSTOP)
    watched = Watched(server, stub_timeout=1.0)
    assert watched.death() == "the stub process of a model hangs (no sign of life for 1 s)"


def test_silence_is_counted_while_somebody_looks() -> None:
    silence = Silence()
    assert silence.look(100.0, {7: [1]}) == {7: 0.0}
    assert silence.look(100.5, {7: [1]}) == {7: 0.5}
    assert silence.look(900.0, {7: [1]}) == {7: 1.5}, "the machine was asleep"
    assert silence.look(900.5, {7: [2]}) == {7: 0.0}
    assert silence.look(901.0, {7: [2], 8: []}) == {7: 0.5, 8: 0.0}
    assert silence.look(901.5, {8: []}) == {8: 0.0}, "no instance of this backend"
    assert silence.look(902.0, {7: [2]}) == {7: 0.0}, "another process with the same id"
