"""The launcher: clear errors before anything starts, and nothing left behind afterwards."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inflight_tools import installation, launcher
from inflight_tools import ports as ports_module
from inflight_tools.installation import (
    LauncherError,
    TritonInstallation,
    find_libpython,
    find_wheel,
    lay_out_interpreter,
)
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports, resolve_ports
from inflight_tools.processes import children, end_of, session_members
from inflight_tools.repository import longest_drain
from inflight_tools.server_log import load_failure

needs_server = pytest.mark.skipif(find_wheel() is None, reason="nvidia-pytriton is not installed")

ECHO_BACKEND = """
import subprocess
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        if args["model_name"] == "broken":
            raise ValueError("the checkpoint is not there")
        self.child = subprocess.Popen(["sleep", "600"])

    def execute(self, requests):
        where = np.array([np.__file__.encode()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", where)]) for _ in requests]
"""
WITHOUT_CHILD = ECHO_BACKEND.replace('self.child = subprocess.Popen(["sleep", "600"])', "pass")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text('backend: "inflight"')
    return folder


@pytest.fixture
def backend(tmp_path: Path) -> Path:
    folder = tmp_path / "backend"
    folder.mkdir()
    (folder / "model.py").write_text(ECHO_BACKEND)
    return folder


def _shm_files(server: TritonServer) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(server.shm_prefix)]


def _wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)


def test_picked_ports_are_free_and_distinct() -> None:
    ports = pick_ports(5)
    assert len(set(ports)) == 5
    assert max(ports) < 32768, "no outgoing connection takes one before it is used"
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_no_other_worker_of_the_tests_picks_the_same_ports() -> None:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    assert {port % 20 for port in pick_ports(5)} == {number % 20}


def test_a_picked_port_is_none_of_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = pick_ports(1)
    monkeypatch.setattr(ports_module, "_OURS", [asked])
    monkeypatch.setattr(ports_module, "_TRIES", 1)
    found = resolve_ports({"HTTP": asked, "GRPC": 0, "metrics": 0}, "127.0.0.1")
    assert found["HTTP"] == asked and len(set(found.values())) == 3


def test_a_port_in_use_names_the_port_and_the_option(repository: Path) -> None:
    for option in ["http", "grpc", "metrics"]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = TritonServer(repository, **{f"{option}_port": port})
            with pytest.raises(LauncherError, match=rf"port {port} .*in use.*--{option}-port"):
                server.start()
            assert server.process is None


def test_one_port_for_two_services_is_rejected(repository: Path) -> None:
    with pytest.raises(LauncherError, match=r"port 8123 is given to more than one service; change --http-port"):
        TritonServer(repository, http_port=8123, metrics_port=8123).start()


def test_an_unusable_address_or_file_is_named(repository: Path) -> None:
    for options, says in [
        ({"http_port": 99999}, r"port 99999 \(HTTP\) must be between 0 and 65535; change --http-port"),
        ({"grpc_port": -1}, r"port -1 \(GRPC\) must be between 0 and 65535; change --grpc-port"),
        ({"host": "203.0.113.1"}, "cannot listen on host '203.0.113.1': .*; change --host"),
        ({"host": "a..b"}, r"cannot listen on host 'a\.\.b': .*; change --host"),
        ({"host": "203.0.113.1", "http_port": 8000}, "change --host"),
        ({"log_file": "/dev/full"}, "/dev/full: not a regular file"),
    ]:
        server = TritonServer(repository, **options)
        with pytest.raises(LauncherError, match=says):
            server.start()
        assert server.process is None


def test_no_such_repository(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="missing: no such model repository folder"):
        TritonServer(tmp_path / "missing").start()


def _fake_installation(tmp_path: Path, *versions: str) -> TritonInstallation:
    stub = tmp_path / "stub"
    stub.write_text("")
    return TritonInstallation(tmp_path / "tritonserver", tmp_path, dict.fromkeys(versions, stub))


def test_a_python_without_a_stub_lists_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"no stub for Python 3\.\d+ \(available: 3\.8, 3\.90\)"):
        _fake_installation(tmp_path, "3.90", "3.8").lay_out(tmp_path / "backends", {})


def test_a_python_without_a_stub_leaves_no_temporary_files(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonInstallation, "find", lambda: _fake_installation(tmp_path, "3.8"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(temporary))
    with pytest.raises(LauncherError, match="no stub for Python"):
        TritonServer(repository).start()
    assert list(temporary.iterdir()) == []


def test_a_missing_libpython_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.Path, "is_file", lambda self: False)
    with pytest.raises(LauncherError, match=r"libpython3\.\d+\.so\.1\.0 not found.*apt install libpython3\.\d+"):
        find_libpython()


def test_libpython_is_the_running_version() -> None:
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in find_libpython().name


def test_no_tritonserver_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITONSERVER", raising=False)
    monkeypatch.setattr(installation, "find_wheel", lambda: None)
    monkeypatch.setattr(installation, "_OPT", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LauncherError, match=r"tritonserver not found; .*pip install"):
        TritonInstallation.find()


def test_tritonserver_variable_must_name_an_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER", "/nowhere/tritonserver")
    with pytest.raises(LauncherError, match="TRITONSERVER=/nowhere/tritonserver is not an executable"):
        TritonInstallation.find()


def test_an_installed_server_reads_the_stub_version_from_the_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    python_backend = tmp_path / "backends" / "python"
    binary.parent.mkdir()
    python_backend.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (python_backend / "triton_python_backend_stub").write_bytes(b"\x7fELF..libpython3.99.so.1.0..")
    monkeypatch.setenv("TRITONSERVER", str(binary))
    assert list(TritonInstallation.find().stubs) == ["3.99"]


def test_the_reason_of_a_load_failure_comes_from_the_log() -> None:
    log = (
        'I1120 server.cc:1] "loading: demo:1"\n'
        r"""E1120 11:59:11 model_lifecycle.cc:642] "failed to load 'demo' version 1: Internal: """
        r"""ConfigError: model \"x\" is not there\n\nAt:\n  model.py(3): initialize\n\""""
    )
    assert load_failure(log) == "model 'demo' failed to load: ConfigError: model \"x\" is not there"
    assert load_failure('I1120 server.cc:1] "loading: demo:1"\n') is None


def test_session_members_and_ended_children() -> None:
    # The shell leads a session; one child of it sleeps, another one becomes a zombie, because no process waits for it.
    script = "sleep 600 & sh -c 'kill -FPE $$' & exec sleep 600"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as leader:
        try:
            # The sleeper, too, is called "sh" until it has become `sleep`.
            _wait_until(lambda: children(leader.pid, "sleep") and any(map(end_of, children(leader.pid, "sh"))))
            (zombie,) = children(leader.pid, "sh")
            (sleeper,) = children(leader.pid, "sleep")
            members = session_members(leader.pid)
            assert set(members) == {leader.pid, sleeper}
            assert os.waitstatus_to_exitcode(end_of(zombie) or 0) == -signal.SIGFPE
            assert end_of(sleeper) is None
            assert children(leader.pid, "other") == []
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
    _wait_until(lambda: not session_members(leader.pid))  # its child dies on its own time
    assert children(leader.pid, "sleep") == []
    assert end_of(leader.pid) is None


def test_the_stubs_interpreter_imports_what_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "from_pythonpath.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.chdir(tmp_path)
    folder = lay_out_interpreter(tmp_path / "python")
    monkeypatch.delenv("PYTHONPATH")
    # From Python 3.11 on the stub runs isolated, as an interpreter does with `-I`.
    code = "import sys, numpy, msgspec, inflight, from_pythonpath; print(sys.prefix, numpy.__file__)"
    ran = subprocess.run([folder / "python3", "-I", "-c", code], capture_output=True, text=True, cwd="/")
    assert ran.stdout.split() == [str(tmp_path / "python"), np.__file__], ran.stderr


@pytest.mark.nightly  # tests/e2e/test_draining.py has a stop under load
@needs_server
@pytest.mark.parametrize("forgotten", [False, True])
def test_start_serve_stop_leaves_nothing(repository: Path, backend: Path, tmp_path: Path, forgotten: bool) -> None:
    """A child that the stub has forgotten is killed after some seconds."""
    if not forgotten:
        (backend / "model.py").write_text(WITHOUT_CHILD)
    log_file = tmp_path / "server.log"
    with TritonServer(repository, backend_dir=backend, log_file=log_file, exit_timeout=5) as server:
        assert server.process is not None
        pid = server.process.pid
        body = b'{"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'
        url = f"http://{server.http_address}/v2/models/echo/infer"
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            answer = response.read().decode()
        assert f'"{np.__file__}"' in answer  # the stub imports from this environment
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as response:
            assert b"nv_inference_request_success" in response.read()
        assert len(session_members(pid)) >= 2 + forgotten  # server, stub, and the stub's forgotten child
        assert _shm_files(server)
        runtime_dir = server._runtime_dir
        assert runtime_dir is not None and runtime_dir.exists()
    assert session_members(pid) == []
    assert _shm_files(server) == []
    assert not runtime_dir.exists()
    assert "successfully unloaded 'echo'" in server.log_text()
    assert "successfully unloaded 'echo'" in log_file.read_text()
    server.stop()


@pytest.mark.nightly  # test_cli.py has it with `inflight serve`
@needs_server
def test_a_model_that_fails_gives_its_reason_and_leaves_nothing(repository: Path, backend: Path) -> None:
    (repository / "echo").rename(repository / "broken")
    server = TritonServer(repository, backend_dir=backend, exit_timeout=5)
    with pytest.raises(LauncherError, match=r"model 'broken' failed to load: .*the checkpoint is not there"), server:
        pytest.fail("the server must not become ready")
    assert server.process is not None
    assert session_members(server.process.pid) == []
    assert _shm_files(server) == []


@needs_server
def test_a_bad_argument_is_reported_in_the_servers_words(repository: Path, backend: Path) -> None:
    server = TritonServer(repository, backend_dir=backend, extra_args=["--no-such-option"])
    with pytest.raises(LauncherError, match=r"ended with status \d+: .*no-such-option"), server:
        pytest.fail("the server must not become ready")


def test_a_server_is_ready_when_its_metrics_are_too(tmp_path: Path) -> None:
    """Triton opens the metrics' port last, after it has said that it is ready."""

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    looks = 0

    def open_the_metrics() -> None:
        nonlocal looks
        looks += 1
        metrics.listen()

    process = subprocess.Popen(["sleep", "600"])
    with socket.socket() as metrics, http.server.HTTPServer(("127.0.0.1", 0), Ready) as triton:
        metrics.bind(("127.0.0.1", 0))
        threading.Thread(target=triton.serve_forever, daemon=True).start()
        server = TritonServer(tmp_path)
        server.process, server.ports = process, {"HTTP": triton.server_port, "metrics": metrics.getsockname()[1]}
        try:
            server.wait_ready(timeout=60, check=open_the_metrics)
            assert looks == 1
        finally:
            triton.shutdown()
            process.kill()
            process.wait()


def test_a_stop_waits_as_long_as_the_longest_drain(tmp_path: Path) -> None:
    for number, (said, seconds) in enumerate(
        [
            ({"a": {"model": "x"}, "b": {"model": "y", "drain_timeout": 90}}, 90),
            ({"a": {"model": "x", "drain_timeout": "7"}}, 7),
            ({"a": {"model": "x", "drain_timeout": 7}, "b": {"model": "y"}}, 30),
            ({"a": {"model": "x", "drain_timeout": -1}, "b": ["nonsense"]}, 30),
            ({}, 30),
        ]
    ):
        for name, settings in said.items():
            version = tmp_path / str(number) / name / "1"
            version.mkdir(parents=True)
            (version / "model.json").write_text(json.dumps(settings))
        assert longest_drain([tmp_path / str(number)]) == seconds


PARENT = """
import sys, time
from inflight_tools.launcher import TritonServer
server = TritonServer(sys.argv[1], backend_dir=sys.argv[2], exit_timeout=5)
with server:
    print(server.process.pid, server.shm_prefix, *server.ports.values(), flush=True)
    time.sleep(600)
"""


@pytest.mark.nightly  # tests/e2e/test_stopping.py has it with streams
@needs_server
def test_the_server_ends_when_its_parent_is_killed_and_leaves_nothing(
    repository: Path, backend: Path, tmp_path: Path
) -> None:
    (backend / "model.py").write_text(WITHOUT_CHILD)
    command = [sys.executable, "-c", PARENT, str(repository), str(backend)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid, prefix, *ports = parent.stdout.readline().split()
        assert session_members(int(pid))
        assert list(temporary.iterdir())
        parent.send_signal(signal.SIGKILL)
    _wait_until(lambda: not session_members(int(pid)) and not list(temporary.iterdir()))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
    resolve_ports(dict(zip(("HTTP", "GRPC", "metrics"), map(int, ports))), "127.0.0.1")
