"""`inflight serve` ends under load, stopped or killed, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_repository import write_repository
from processes_of import command_line
from supervisor_rig import wait_for
from wire import GrpcStream, Responses

from inflight.frontend.lifecycle.instance_registry import states_of
from inflight_client import Client
from inflight_tools.ports import resolve_ports
from inflight_tools.processes import STUB_NAME, children

SERVE = [sys.executable, "-c", "from inflight_tools.cli import app; app()", "serve", "--unrestricted"]
SERVE += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--no-openai"]
PROMPT = "the list of names"


class Serving:
    """An `inflight serve` of two instances with one engine process (a fake one), and streams that its engine holds."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        repository = write_repository(folder)
        config = repository / "fake" / "config.pbtxt"
        config.write_text(config.read_text().replace("KIND_CPU", "KIND_CPU, count: 2"))
        self.process = subprocess.Popen(
            [*SERVE, f"--model-repository={repository}", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self._temporary)},
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("ready: "), self.process.communicate()
        self._ports = list(map(int, re.findall(r"127\.0\.0\.1:(\d+)", said)))
        self._all = psutil.Process(self.process.pid).children(recursive=True)
        lines = [(process, command_line(process)) for process in self._all]
        self.server = next(process.pid for process, line in lines if line and Path(line[0]).name == "tritonserver")
        fakes = [(process, line) for process, line in lines if "fake_engine" in " ".join(line)]
        (self._engine,) = [process for process, line in fakes if "--fork-server" not in line]  # not the spare
        self.stubs = children(self.server, STUB_NAME)
        self.grpc = f"127.0.0.1:{self._ports[1]}"
        self.stream = GrpcStream(self.grpc, "fake")

    def hold_streams(self) -> dict[str, Responses]:
        """Four streams, at least one with more to come; their engine process is stopped."""
        for k in (3, 2, 1, 0):
            tokens = {"max_tokens": 40 + k}
            inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": tokens, "return_token_ids": True}
            self.stream.send(str(k), **inputs, tenant="" if k else "stop=3")
            self.stream.wait_chunks(str(k), 1)
        wait_for(lambda: self._engine.status() == psutil.STATUS_STOPPED)
        self._shared_memory = {name for process in self._all for name in _shared_memory(process)}
        assert self._shared_memory, "the server and its stubs talk in shared memory"
        return self.stream.answers

    def wait_draining(self) -> None:
        """Until an instance drains; one without streams is "drained" at once, or is never told."""
        wait_for(lambda: "draining" in [entry.state for pid in self.stubs for entry in states_of(pid)])

    def release_streams(self) -> None:
        self._engine.resume()

    def replace_engine(self) -> None:
        """The next one continues the streams, is stopped by the same stream, and then released."""
        self._engine.kill()
        self._engine = wait_for(self._stopped_engine)
        self._all.append(self._engine)
        self._engine.resume()

    def _stopped_engine(self) -> psutil.Process | None:
        for process in psutil.Process(self.server).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_engine = "fake_engine" in " ".join(process.cmdline())
                if process != self._engine and is_engine and process.status() == psutil.STATUS_STOPPED:
                    return process
        return None

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 30
        while left := [process for process in self._all if _lives(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        assert [name for name in self._shared_memory if Path(name).exists()] == []
        assert [path for path in self._temporary.iterdir() if path.suffix != ".log"] == [], "but the log of a failure"
        http, grpc, metrics = self._ports
        resolve_ports({"HTTP": http, "GRPC": grpc, "metrics": metrics}, "127.0.0.1")  # raises if one is taken

    def close(self) -> None:
        self.stream.close()
        self.process.kill()
        self.process.communicate()
        for process in self._all:
            with contextlib.suppress(psutil.Error):
                if "sweeper.py" not in " ".join(process.cmdline()):  # it removes what a test that failed has left
                    process.kill()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _shared_memory(process: psutil.Process) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                yield line[line.index("/dev/shm/") :]


@pytest.fixture
def serving(triton_installed: None, tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.close()


def test_a_stop_lets_streams_finish_although_their_engine_dies_and_leaves_nothing(serving: Serving) -> None:
    answers = serving.hold_streams()
    serving.process.send_signal(signal.SIGTERM)
    serving.wait_draining()
    serving.replace_engine()
    _, errors = serving.process.communicate(timeout=60)
    assert (serving.process.returncode, errors.splitlines()[-1]) == (0, "stopped")
    assert [str(answer.error) for answer in answers.values()] == ["None"] * 4, errors
    assert [len(answers[str(k)].token_ids) for k in range(4)] == [40, 41, 42, 43]
    serving.assert_nothing_left()


@pytest.mark.nightly  # tests/tools/test_watch.py has the signals
def test_a_second_stop_signal_ends_at_once(serving: Serving) -> None:
    answers = serving.hold_streams()
    serving.process.send_signal(signal.SIGINT)
    serving.wait_draining()
    serving.process.send_signal(signal.SIGINT)
    _, errors = serving.process.communicate(timeout=20)  # drain_timeout is 30 s
    assert (serving.process.returncode, errors.splitlines()[-1]) == (0, "stopped")
    wait_for(lambda: any(answer.error for answer in answers.values()))  # tritonclient reports only one
    serving.assert_nothing_left()


def test_a_server_that_is_killed_leaves_nothing(serving: Serving) -> None:
    serving.hold_streams()
    os.kill(serving.server, signal.SIGKILL)
    _, errors = serving.process.communicate(timeout=20)
    assert serving.process.returncode == 3
    assert errors.splitlines()[-1].startswith("inflight: tritonserver died (SIGKILL)")
    serving.assert_nothing_left()


@pytest.mark.nightly  # tests/tools/test_watch.py has stubs that give no sign of life
def test_stubs_that_are_stopped_end_the_server(triton_installed: None, tmp_path: Path) -> None:
    """Triton goes on to report the model as ready; a client that asks the model itself notices."""
    with (
        contextlib.closing(Serving(tmp_path, "--stub-timeout=3")) as serving,
        Client(serving.grpc, model="fake") as client,
    ):
        answers = serving.hold_streams()
        assert client.responds()
        for stub in serving.stubs:
            os.kill(stub, signal.SIGSTOP)
        assert not client.responds()
        _, errors = serving.process.communicate(timeout=60)
        assert serving.process.returncode == 3
        assert errors.splitlines()[-1].startswith("inflight: the stub process of model 'fake' hangs (no sign of life")
        wait_for(lambda: any(answer.error for answer in answers.values()))
        serving.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_nothing_once_streams_have_ended(serving: Serving) -> None:
    answers = serving.hold_streams()
    serving.process.kill()
    serving.process.wait()
    serving.wait_draining()
    serving.release_streams()
    serving.stream.wait(*answers)
    assert [len(answers[str(k)].token_ids) for k in range(4)] == [40, 41, 42, 43]
    serving.stream.close()  # the server waits for its clients, up to its exit timeout
    serving.assert_nothing_left()
