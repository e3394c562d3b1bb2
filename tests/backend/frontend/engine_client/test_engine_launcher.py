"""Engine processes that are forks of a fork server, and what happens when that dies, hangs or cannot fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_engine import echo
from frontend_rig import FAKE_ENGINE
from processes_of import pipes_and_sockets
from supervisor_rig import PROMPT, SupervisorRig, alive, tokens, wait_for

from inflight.config import EngineConfig
from inflight.frontend.engine_client import fork_server_process
from inflight.frontend.engine_client.engine_launcher import EngineLauncher
from inflight.frontend.engine_client.engine_process import EngineStartError
from inflight.frontend.engine_client.fork_server_process import ForkServerProcess
from inflight.frontend.engine_client.supervisor import Supervisor


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    yield rig
    rig.stop()


def engine_pid(rig: SupervisorRig, *not_these: int) -> int:
    return wait_for(lambda: rig.supervisor.pid not in (None, *not_these) and rig.supervisor.pid)


def fork_server_pid(rig: SupervisorRig) -> int:
    server = rig.supervisor._launcher._fork_server
    assert server is not None
    return server.pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid))


def never_checked(rig: SupervisorRig) -> None:
    """The watch thread replaces no fork server any more."""
    checked = threading.Event()
    rig.supervisor._launcher.keep_fork_server = checked.set  # type: ignore[method-assign,assignment]
    assert checked.wait(20)


def test_every_engine_is_a_fork_of_one_process(rig: SupervisorRig) -> None:
    client = rig.open(orders="pause=8", max_tokens=50)
    server, engines = fork_server_pid(rig), [engine_pid(rig)]
    for _ in range(3):
        wait_for(lambda: len(tokens(client)) == 8 * len(engines))
        os.kill(engines[-1], signal.SIGKILL)
        engines.append(engine_pid(rig, *engines))
        assert psutil.Process(engines[-1]).ppid() == server == fork_server_pid(rig)
    rig.order(go="")
    assert tokens(client.wait()) == echo(PROMPT, 50)
    assert len([line for line in rig.lines if "died (signal 9, SIGKILL)" in line]) == 3


def test_a_fork_inherits_no_descriptor_of_the_stub_and_none_of_the_engines_before(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    rig = SupervisorRig(tmp_path / "control.json").start()
    try:
        counts = []
        for _ in range(2):
            engine = engine_pid(rig)
            rig.open(max_tokens=1).wait()  # it has opened everything that it needs
            held = pipes_and_sockets(engine)
            counts.append(len(held))
            assert f"pipe:[{os.fstat(writes).st_ino}]" not in held
            os.kill(engine, signal.SIGKILL)
            engine_pid(rig, engine)
        assert counts[0] == counts[1]
    finally:
        rig.stop()
        os.close(reads)
        os.close(writes)


def test_an_engine_outlives_its_fork_server_and_another_takes_its_place(rig: SupervisorRig) -> None:
    server, engine = fork_server_pid(rig), engine_pid(rig)
    client = rig.open(orders="hold=8", max_tokens=100)
    wait_for(lambda: client.responses)
    rig.supervisor._watchdog.interval = 0.02
    kill(server)
    successor = wait_for(lambda: fork_server_pid(rig) != server and fork_server_pid(rig))
    rig.order(go="")
    assert tokens(client.wait()) == echo(PROMPT, 100)
    assert rig.supervisor.pid == engine
    wait_for(lambda: rig.supervisor._launcher._fork_server.is_ready)  # type: ignore[union-attr]
    kill(engine)
    assert psutil.Process(engine_pid(rig, engine)).ppid() == successor
    assert any("died (its exit status is unknown)" in line for line in rig.lines)
    assert "the spare process ended (signal 9, SIGKILL); another one is being started" in rig.lines
    assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)


def test_one_that_is_outdated_has_a_successor_and_still_reports_how_its_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_OUTDATED", "yes")
    rig = SupervisorRig(tmp_path / "control.json").start()
    try:
        rig.supervisor._watchdog.interval = 0.02
        server, engine = fork_server_pid(rig), engine_pid(rig)
        client = rig.open(orders="hold=8", max_tokens=50)
        successor = wait_for(lambda: fork_server_pid(rig) != server and fork_server_pid(rig))
        assert (rig.supervisor.pid, alive(server)) == (engine, True)
        kill(engine)
        assert psutil.Process(engine_pid(rig, engine)).ppid() == successor
        wait_for(lambda: not alive(server))
        assert any("died (signal 9, SIGKILL)" in line for line in rig.lines)
        rig.order(go="")
        assert tokens(client.wait()) == echo(PROMPT, 50)
        assert fork_server_pid(rig) == successor
    finally:
        rig.stop()
    assert not alive(successor)


def test_both_can_die_at_once(rig: SupervisorRig) -> None:
    never_checked(rig)
    server, engine = fork_server_pid(rig), engine_pid(rig)
    kill(server)
    kill(engine)
    assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
    assert not {server, engine} & {fork_server_pid(rig), engine_pid(rig)}


def test_a_fork_server_that_hangs_is_replaced(rig: SupervisorRig, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, seconds = ForkServerProcess.stop, fork_server_process._FORK_SECONDS

    def stopped(server: ForkServerProcess) -> None:
        monkeypatch.setattr(fork_server_process, "_FORK_SECONDS", seconds)  # its successor is only slow
        stop(server)

    monkeypatch.setattr(ForkServerProcess, "stop", stopped)
    monkeypatch.setattr(fork_server_process, "_FORK_SECONDS", 0.1)
    server, engine = fork_server_pid(rig), engine_pid(rig)
    os.kill(server, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
    assert fork_server_pid(rig) != server
    assert not alive(server)


def test_one_that_still_imports_on_idle_cores_does_not_delay_a_start(rig: SupervisorRig) -> None:
    never_checked(rig)
    engine = engine_pid(rig)
    kill(fork_server_pid(rig))
    assert EngineLauncher.keep_fork_server(rig.supervisor._launcher) == "signal 9, SIGKILL"
    idle = fork_server_pid(rig)
    os.kill(idle, signal.SIGSTOP)  # while it imports
    os.kill(engine, signal.SIGKILL)
    assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
    assert fork_server_pid(rig) != idle


def test_where_it_cannot_fork_every_engine_is_a_program_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_NO_PIDFD", "yes")
    rig = SupervisorRig(tmp_path / "control.json").start()
    try:
        server = fork_server_pid(rig)
        for _ in range(2):
            engine = engine_pid(rig)
            assert psutil.Process(engine).ppid() == os.getpid()
            os.kill(engine, signal.SIGKILL)
            engine_pid(rig, engine)
        assert fork_server_pid(rig) == server
        assert not [child for child in psutil.Process(server).children() if alive(child.pid)]
    finally:
        rig.stop()


def test_imports_that_leave_threads_are_repeated_in_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_THREADS", "2")
    rig = SupervisorRig(tmp_path / "control.json").start()
    try:
        engine = engine_pid(rig)
        assert "--fork-server" not in psutil.Process(engine).cmdline()
        os.kill(engine, signal.SIGKILL)
        assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
        kill(engine_pid(rig, engine))
        assert any("signal 9" in line for line in rig.lines)
    finally:
        rig.stop()
    assert "engine processes do their imports themselves: the imports have started threads: " in capfd.readouterr().err


def test_all_processes_end_with_the_supervisor(rig: SupervisorRig) -> None:
    processes = fork_server_pid(rig), engine_pid(rig)
    rig.stop()
    assert not any(map(alive, processes))


@pytest.mark.parametrize(
    ("imports", "seconds", "error"),
    [
        ("raise SystemExit(3)", 60, r"cannot start the engine process: its fork server ended \(exit status 3\)"),
        ("import time; time.sleep(60)", 0.3, r"was not ready after 0.3 s: raise engine_start_timeout in model.json"),
    ],
)
def test_imports_that_fail_or_hang_are_reported(imports: str, seconds: float, error: str) -> None:
    config = EngineConfig(model="fake", engine_start_timeout=seconds)
    supervisor = Supervisor(config, lambda level, line: None, command=[sys.executable, "-c", imports])
    with pytest.raises(EngineStartError, match=error):
        supervisor.start()
    server = supervisor._launcher._fork_server
    assert server is not None
    assert server.has_ended
    assert supervisor._launcher.keep_fork_server() is None


def test_it_can_be_stopped_during_the_imports() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    supervisor = Supervisor(EngineConfig(model="fake"), lambda level, line: None, command=command)
    supervisor._threads[0].start()
    server = wait_for(lambda: supervisor._launcher._fork_server)
    supervisor.stop()
    assert not alive(server.pid)


@pytest.mark.parametrize("start", ["", "hang"])
def test_all_processes_end_with_a_stub_that_is_killed(start: str, tmp_path: Path) -> None:
    """Even one that loads, and reads no pipe."""
    (tmp_path / "control.json").write_text(f'{{"start": "{start}"}}')
    program = (
        "import time\n"
        "from inflight.config import EngineConfig\n"
        "from inflight.frontend.engine_client.supervisor import Supervisor\n"
        f"s = Supervisor(EngineConfig(model='fake'), print, command={FAKE_ENGINE!r},\n"
        f"               env={{'FAKE_ENGINE_CONTROL': {str(tmp_path / 'control.json')!r}}})\n"
        "s._threads[0].start()\n"
        "while s._engine_process is None: time.sleep(0.01)\n"
        "print(s._launcher._fork_server.pid, s._engine_process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    stub = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert stub.stdout is not None
    with stub.stdout:
        processes = list(map(int, stub.stdout.readline().split()))
        assert len(processes) == 2
        assert all(map(alive, processes))
        stub.kill()
        stub.wait()
        wait_for(lambda: not any(map(alive, processes)))


def test_without_the_option_every_engine_is_a_child(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json", spare_engine=False).start()
    try:
        engine = engine_pid(rig)
        os.kill(engine, signal.SIGKILL)
        assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
        assert psutil.Process(engine_pid(rig, engine)).ppid() == os.getpid()
        assert rig.supervisor._launcher._fork_server is None
    finally:
        rig.stop()
