"""The gateway as a process of its own: it starts, its death is noticed, its workers share metrics, and it ends."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from processes_of import command_line

from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.installation import LauncherError, ServerDied
from inflight_tools.ports import pick_ports

NO_SERVER = "127.0.0.1:1"


def get(url: str, path: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url.removesuffix("/v1") + path, timeout=20, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_gateway_that_dies_is_noticed() -> None:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(port=port))
    gateway.start(NO_SERVER)
    try:
        process = gateway._process
        assert process is not None and get(gateway.url, "/health")[0] == 200
        assert "INFLIGHT" not in "".join(psutil.Process(process.pid).cmdline())
        gateway.check()
        status, text = get(gateway.url, "/v1/models")
        assert status == 503 and json.loads(text)["error"]["code"] == "upstream_unreachable"
        process.kill()
        process.wait()
        with pytest.raises(ServerDied, match=r"the gateway died \(SIGKILL\)"):
            gateway.check()
    finally:
        gateway.stop()
    assert gateway._process is None


def test_a_gateway_that_cannot_listen_says_so() -> None:
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(host="192.0.2.1", port=9000))
    with pytest.raises(LauncherError, match="ended while it started"):
        gateway.start(NO_SERVER)
    gateway.stop()


def test_workers_share_their_metrics_and_end_with_their_parent(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    (port,) = pick_ports(1)
    server = ServerOptions(port=port, workers=2, ssl_keyfile=str(key), ssl_certfile=str(certificate))
    gateway = GatewayProcess(GatewayOptions(), server)
    gateway._spawn()
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return get(url, "/health", context)[0] == 200
            except OSError:
                return False

        wait_for(answers)
        for _ in range(10):
            get(url, "/version", context)
        counted = 'inflight_gateway_requests_total{endpoint="/version",status="200"} 10.0'
        wait_for(lambda: counted in get(url, "/metrics", context)[1])  # a worker counts what it has answered
        assert gateway._process is not None
        parent = psutil.Process(gateway._process.pid)
        workers = wait_for(lambda: [one for one in parent.children() if "spawn_main" in "".join(command_line(one))])
        folder = Path(workers[0].environ()["PROMETHEUS_MULTIPROC_DIR"])
        assert folder.is_dir()
        parent.send_signal(signal.SIGKILL)
        gateway._process.wait()
        psutil.wait_procs(workers, timeout=30)
        assert not any(worker.is_running() for worker in workers) and not folder.exists()
    finally:
        gateway.stop()
