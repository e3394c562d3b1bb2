from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import echo
from frontend_rig import FAKE_ENGINE, Client, Stats, demo_tokenizer

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.contract import GenerationRequest
from inflight.frontend.engine_process import EngineStartError, engine_command
from inflight.frontend.streams import Streams
from inflight.frontend.supervisor import RestartPolicy, Supervisor

TOKENIZER = demo_tokenizer()
PROMPT = TOKENIZER.encode("the list of names")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited for nothing"
        time.sleep(0.005)
    return value


class Rig:
    """Supervisor and streams around the fake engine."""

    def __init__(self, control: Path, **config: Any) -> None:
        self.control = control
        self.lines: list[str] = []
        self.supervisor = Supervisor(
            EngineConfig(model="fake", **config),
            lambda level, line: self.lines.append(line),
            command=FAKE_ENGINE,
            env={"FAKE_ENGINE_CONTROL": str(control)},
            restart=RestartPolicy(first_delay=0.01, longest_delay=0.05, refuse_after=2),
        )
        self.stats = Stats()
        self.streams = Streams(TOKENIZER, self.supervisor, self.stats, self.lines.append, sweep_seconds=0.01)

    def start(self) -> Rig:
        self.ready = self.supervisor.start()
        self.streams.start()
        self.supervisor.connect(self.streams)
        return self

    def order(self, **start: str) -> None:
        self.control.write_text(json.dumps(start))

    def open(self, tenant: str = "", stream: bool = True, **params: Any) -> Client:
        client = Client()
        request = GenerationRequest(
            PROMPT, SamplingParams(**params), stream, tenant=tenant, returns=frozenset({"return_token_ids"})
        )
        self.streams.open(request, client)
        return client

    def stop(self) -> None:
        self.streams.stop("over")
        self.supervisor.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "control.json").start()
    yield rig
    rig.stop()


def tokens(client: Client) -> list[int]:
    return [token for response in client.responses for token in response["token_ids"].tolist()]


def test_requests_of_many_kinds_get_their_tokens(rig: Rig) -> None:
    assert rig.ready.attention_backend == "fake"
    clients = [rig.open(stream=k % 2 == 0, max_tokens=k + 1) for k in range(30)]
    for k, client in enumerate(clients):
        assert tokens(client.wait()) == echo(PROMPT, k + 1)
    assert rig.supervisor._in_engine == set()


def test_stop_leaves_no_process(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "control.json").start()
    pid = rig.supervisor.pid
    assert pid is not None
    client = rig.open(tenant="delay=0.01", max_tokens=500)
    assert client.arrived.wait(10)
    rig.stop()
    assert not alive(pid)
    assert client.error == ("UNAVAILABLE", "over")
    rig.supervisor.stop()  # again


def test_a_death_fails_what_was_in_the_engine_and_a_new_one_serves(rig: Rig) -> None:
    old = rig.supervisor.pid
    slow = rig.open(tenant="delay=0.01", max_tokens=1000)
    assert slow.arrived.wait(10)
    crash = rig.open(tenant="crash=3", max_tokens=100)
    reason = "the engine process died (signal 9, SIGKILL); it is being restarted"
    assert crash.wait().error == ("UNAVAILABLE", reason)
    assert slow.wait().error == ("UNAVAILABLE", reason)
    assert tokens(crash) == echo(PROMPT, len(tokens(crash)))
    after = rig.open(max_tokens=5)  # waits for the restart
    assert tokens(after.wait()) == echo(PROMPT, 5)
    assert rig.supervisor.pid not in (None, old)
    assert any("open requests failed" in line for line in rig.lines)


def test_an_engine_that_says_why_it_dies(rig: Rig) -> None:
    error = rig.open(tenant="fail=2").wait().error
    assert error == ("UNAVAILABLE", "the engine process died (engine step failed: told to); it is being restarted")


def test_an_engine_that_talks_nonsense_is_replaced(rig: Rig) -> None:
    error = rig.open(tenant="nonsense=1").wait().error
    assert error is not None
    assert "the engine process died (it sent a frame that is no message" in error[1]
    assert tokens(rig.open(max_tokens=2).wait()) == echo(PROMPT, 2)


def test_refusal_by_the_engine(rig: Rig) -> None:
    assert rig.open(tenant="refuse=UNAVAILABLE").wait().error == ("UNAVAILABLE", "refused with UNAVAILABLE")
    assert rig.supervisor._in_engine == set()


def test_cancel_frees_the_engine(rig: Rig) -> None:
    client = rig.open(tenant="delay=0.01", max_tokens=2000)
    assert client.arrived.wait(10)
    client.cancelled = True
    client.wait()
    wait_for(lambda: rig.stats.steps and rig.stats.steps[-1].running == 0)


def test_stop_string_of_one_sequence_aborts_only_that(rig: Rig) -> None:
    client = Client()
    params = SamplingParams(n=2, max_tokens=40, stop=["list of n"])
    rig.streams.open(GenerationRequest(PROMPT, params, True, tenant="delay=0.005"), client)
    client.wait()
    assert [text.rstrip() for text in client.texts()] == ["the", "the"]
    wait_for(lambda: rig.stats.steps[-1].running == 0)


def test_requests_that_wait_for_a_restart_are_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "control.json", max_queue_size=2).start()
    try:
        rig.order(start="hang")
        pid = rig.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: rig.supervisor.pid is None)
        waiting = [rig.open(max_tokens=2) for _ in range(2)]
        error = rig.open().wait().error
        assert error is not None
        assert error[0] == "UNAVAILABLE"
        assert "2 requests (max_queue_size) wait" in error[1]
        waiting[0].cancelled = True  # leaves its place
        assert waiting[0].wait().error == ("CANCELLED", "Request was cancelled")
        wait_for(lambda: len(rig.supervisor._queued) == 1)
        rig.control.unlink()
        hanging = wait_for(lambda: rig.supervisor._process)
        os.kill(hanging.pid, signal.SIGKILL)
        assert tokens(waiting[1].wait()) == echo(PROMPT, 2)
    finally:
        rig.stop()


def test_after_several_failed_restarts_requests_are_refused_until_one_succeeds(rig: Rig) -> None:
    rig.order(start="exit")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.pid is None)
    error = rig.open().wait().error
    assert error is not None
    assert error[0] == "UNAVAILABLE"
    assert "cannot be restarted (" in error[1]
    assert "ended while it loaded the model (exit status 7)" in error[1]
    rig.control.unlink()
    wait_for(lambda: rig.supervisor.pid)
    assert tokens(rig.open(max_tokens=2).wait()) == echo(PROMPT, 2)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("fatal", "told to fatal"),
        ("fail", "told to fail"),
        ("exit", "the engine process ended while it loaded the model (exit status 7)"),
        ("hang", "the engine was not ready after 1 s: raise engine_start_timeout in model.json"),
    ],
)
def test_a_first_start_that_fails_raises_and_leaves_nothing(tmp_path: Path, order: str, says: str) -> None:
    rig = Rig(tmp_path / "control.json", engine_start_timeout=1.0)
    rig.order(start=order)
    with pytest.raises(EngineStartError) as caught:
        rig.supervisor.start()
    assert str(caught.value) == says
    assert rig.supervisor._process is None
    assert not [thread for thread in rig.supervisor._threads if thread.is_alive()]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"python_executable": "/nonexistent/python"}, "no program '/nonexistent/python'; mend python_executable"),
        ({"python_executable": "a\0b"}, "cannot start the engine process"),
        ({"seed": 10**40}, "cannot start the engine process: OverflowError"),
        ({"engine_start_timeout": 1e300}, "cannot start the engine process: OverflowError"),
    ],
)
def test_what_cannot_even_be_started_is_an_error_and_no_endless_wait(config: dict[str, Any], says: str) -> None:
    supervisor = Supervisor(EngineConfig(model="m", **config), lambda level, line: None)
    with pytest.raises(EngineStartError, match=says):
        supervisor.start()
    assert supervisor._process is None


def test_stop_while_the_engine_loads(tmp_path: Path) -> None:
    import threading

    rig = Rig(tmp_path / "control.json")
    rig.order(start="hang")
    failed: list[BaseException] = []

    def start() -> None:
        try:
            rig.supervisor.start()
        except EngineStartError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    process = wait_for(lambda: rig.supervisor._process)
    rig.supervisor.stop()
    thread.join(10)
    assert failed
    assert not alive(process.pid)


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """Even one that is loading and reads no pipe."""
    import subprocess
    import sys

    control = tmp_path / "control.json"
    control.write_text('{"start": "hang"}')
    program = (
        "import sys, threading, time\n"
        "from inflight.config import EngineConfig\n"
        "from inflight.frontend.supervisor import Supervisor\n"
        f"s = Supervisor(EngineConfig(model='m'), print, command={FAKE_ENGINE!r},"
        f" env={{'FAKE_ENGINE_CONTROL': {str(control)!r}}})\n"
        "threading.Thread(target=s.start, daemon=True).start()\n"
        "while s._process is None: time.sleep(0.01)\n"
        "print(s._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # the child has called prctl
    assert alive(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(pid))


def test_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay=0.1, longest_delay=1.0)
    assert [policy.delay(k) for k in (1, 2, 3, 4, 5, 500)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_the_real_engine_is_a_module_of_the_package() -> None:
    assert engine_command(EngineConfig(model="m"))[1:] == ["-m", "inflight.worker"]
    assert engine_command(EngineConfig(model="m", python_executable="p"))[0] == "p"
