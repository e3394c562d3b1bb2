"""A watch notices deaths and hangs, and recognises an ordinary unload."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight_tools.causes import OutOfMemory, cause
from inflight_tools.processes import end_of
from inflight_tools.restart import Restarts
from inflight_tools.server_log import LoadingModels
from inflight_tools.terminal import stop_signals
from inflight_tools.watch import Death, LiveChecks, Watch

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
        self._stub = folder / "triton_python_backend_stub"
        shutil.copy("/bin/sleep", self._stub)
        self.log_file, self.log_start = folder / "log", 0
        self.log_file.write_text("")
        self._silent = socket.create_server(("127.0.0.1", 0))
        self.http_address = f"127.0.0.1:{self._silent.getsockname()[1]}"
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
        return self.tell("start", str(self._stub), *seconds)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._silent.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


class Watched:
    """A watch that runs in a thread."""

    def __init__(self, server: Any, **options: Any) -> None:
        never = LiveChecks("http://127.0.0.1:1", period=600)
        watch = Watch(server, **{"load_timeout": 600.0, "live": never, **options})
        self.deaths: list[Death] = []
        self._thread = threading.Thread(target=lambda: self.deaths.append(watch.wait()), daemon=True)
        self._thread.start()

    def death(self) -> Death:
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

    watch = Watch(server, 600.0, LiveChecks("http://127.0.0.1:1", period=600))  # type: ignore[arg-type]
    with stop_signals() as stop:
        Dropped()
        server.process.kill()  # the watch would return for this
        server.process.wait()
        pytest.fail(f"{watch.wait(stop.check)}: the watch went on")
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
    assert (watched or Watched(server)).death() == Death("stub", -number)


def test_a_stub_that_the_server_reaps_is_not_lost(server: Server) -> None:
    watched = Watched(server)
    for ending in ("0", "600"):  # it exits by itself; the server kills it
        stub = server.start_stub(ending)
        if ending == "600":
            os.kill(stub, signal.SIGKILL)
        server.tell("reap")
    lost = server.start_stub("600")
    os.kill(lost, signal.SIGTERM)
    assert watched.death() == Death("stub", -signal.SIGTERM), "the watch still runs, and only this one was lost"


def test_a_server_that_ends_is_noticed(server: Server) -> None:
    watched = Watched(server)
    server.start_stub("600")
    server.tell("exit")
    assert watched.death() == Death("server", 7)


def test_a_server_that_answers_no_live_check_hangs(server: Server) -> None:
    live = LiveChecks(f"http://{server.http_address}/", period=0.01, timeout=0.05, missed=3)
    death = Watched(server, live=live).death()
    assert death.who == "hung"
    assert "live checks in a row had no answer for" in cause(death, "", OutOfMemory())


def test_one_answer_starts_the_count_of_missed_checks_anew(server: Server) -> None:
    live = LiveChecks("http://127.0.0.1:1/", period=0, missed=3)
    answers = iter([False, False, True, False, False, True])
    finished = threading.Event()

    def answer() -> bool:
        assert live.failure() is None
        value = next(answers, None)
        if value is None:
            finished.set()
            live._ended.set()
            return True
        return value

    live._answers = answer  # type: ignore[method-assign]
    with live:
        assert finished.wait(20)
    assert live.failure() is None


def test_a_load_without_an_end_is_noticed(server: Server) -> None:
    server.log_file.write_text('I1 model_lifecycle.cc:472] "loading: stuck:1"\n')
    death = Watched(server, load_timeout=0.05).death()
    assert death == Death("loading", detail="model 'stuck' was neither loaded nor refused within 0.05 s")
    assert "the launch of its stub failed" in cause(death, "", OutOfMemory())


def test_what_the_log_says_about_loads_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('of an earlier server: "loading: old:1"\n')
    loading = LoadingModels(log, log.stat().st_size, 10.0)
    with open(log, "a") as file:
        file.write('x] "loading: a:1"\nx] "loading: b:12"\nx] "loading: c:1"\nx] "successfully loa')
    assert loading.failure(0.0) is None
    with open(log, "a") as file:
        file.write("ded 'a'\"\n" + r"""E] "failed to load 'b' version 12: Internal: no \"x\"" """ + "\n")
    assert loading.failure(9.0) is None
    late = loading.failure(11.0)
    assert late is not None and late.startswith("model 'c' was neither")
    log.write_text(log.read_text() + "x] \"successfully loaded 'c'\"\n")
    assert loading.failure(12.0) is None


UNCAUGHT = "I1 a\nterminate called after throwing an instance of '{}'\n  what():  {}\nSignal (6) received.\n"


def test_the_cause_of_a_death_is_one_line(tmp_path: Path) -> None:
    for death, log, says in [
        (
            Death("stub", -6, "demo"),
            UNCAUGHT.format("pybind11::error_already_set", "ValueError: array is too big; `arr.size"),
            "the stub process of model 'demo' died (SIGABRT), and its streams would hang: a request declared a tensor "
            "too large for any memory, such as a gRPC shape of 2^61 (ValueError: array is too big; `arr.size)",
        ),
        (Death("server", -6), UNCAUGHT.format("std::bad_alloc", "std::bad_alloc"), "a tensor too large"),
        (Death("server", -6), UNCAUGHT.format("std::runtime_error", "no such thing"), "(SIGABRT): no such thing"),
        (Death("server", -8), "", "tritonserver died (SIGFPE): the known way there is a request for `classification`"),
        (Death("stub", -8), "", "the stub process of a model died (SIGFPE), and its streams would hang"),
        (Death("server", 1), 'E1122 06:46 main.cc:5] "failed to start"\n', "died (exit status 1): failed to start"),
        (Death("server", -9), "I1 x\n", "tritonserver died (SIGKILL)"),
        (Death("server", -99), "", "tritonserver died (signal 99)"),
    ]:
        line = cause(death, log, OutOfMemory(tmp_path))
        assert says in line
        assert "\n" not in line


def test_an_out_of_memory_kill_is_read_from_the_closest_counter(tmp_path: Path) -> None:
    for membership, counter in [
        ("0::/system.slice/triton\n", "sys/fs/cgroup/system.slice/triton/memory.events"),
        ("0::/docker/abc\n", "sys/fs/cgroup/memory.events"),  # the path is the host's
        ("9:name=systemd:/\n4:memory:/docker/abc\n0::/\n", "sys/fs/cgroup/memory/docker/abc/memory.oom_control"),
        ("4:cpu,memory:/x\n", "sys/fs/cgroup/memory/memory.oom_control"),
        ("", "proc/vmstat"),
    ]:
        for file, text in ((Path("proc/self/cgroup"), membership), (Path(counter), "low 0\noom 3\noom_kill 3\nx 1\n")):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        out_of_memory = OutOfMemory(tmp_path)
        killed = SimpleNamespace(who="stub", returncode=-9, model="demo", detail="")
        assert cause(killed, "", out_of_memory) == (  # type: ignore[arg-type]
            "the stub process of model 'demo' died (SIGKILL), and its streams would hang"
        )
        (tmp_path / counter).write_text("low 0\noom 4\noom_kill 4\nx 1\n")
        said = f"the kernel's out-of-memory killer ended it (oom_kill in {tmp_path / counter} has grown)"
        assert said in cause(killed, "", out_of_memory)  # type: ignore[arg-type]


def test_restarts_are_bounded_and_pause_longer_each_time() -> None:
    now = 0.0
    restarts = Restarts(4, window=100, first_pause=1, longest_pause=3, clock=lambda: now)
    assert [restarts.next_pause() for _ in range(5)] == [1, 2, 3, 3, None]
    now = 99
    assert restarts.next_pause() is None
    now = 100
    assert restarts.next_pause() == 1, "what lies longer back than the window is forgotten"
    assert Restarts(0).next_pause() is None
