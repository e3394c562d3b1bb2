"""The chart's probes, hooks and endpoint picker with a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from charts import FULLNAME, MODELS, containers, manifests, only, render
from charts import server as chart_server
from model_entries import killed_at_the_end, write_entry
from processes_of import engine_process, stubs
from replicas import gateway

from inflight_client import Client, RetryPolicy, UnavailableError
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.installation import TritonInstallation
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "container"
KEY = "a-key-of-the-tests-0123"


@pytest.fixture(scope="module")
def replica(
    triton_installed: None, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server with the chart's model entry and an admin key, as in the image."""
    found = render({"model": {"settings": {"device": "cpu", "kv_cache_memory": "64MiB"}}})
    entry = only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]
    repository = tmp_path_factory.mktemp("repository")
    (repository / "demo" / "1").mkdir(parents=True)
    (repository / "demo" / "config.pbtxt").write_text(entry["config.pbtxt"])
    settings = entry["model.json"].replace('"/models/', f'"{ROOT}/model_repository/')
    (repository / "demo" / "1" / "model.json").write_text(settings)
    with killed_at_the_end(TritonServer(repository, model_control_mode="none", admin_key=KEY, env=keeping)) as server:
        yield server


def alive(server: TritonServer, model: str = "demo", timeout: float = 20.0) -> subprocess.CompletedProcess[str]:
    port = server.http_address.rpartition(":")[2]
    command = [sys.executable, SCRIPTS / "inflight-alive", model, "--port", port, "--timeout", str(timeout)]
    return subprocess.run(command, capture_output=True, text=True)


def ready(server: TritonServer) -> int:
    path = containers(chart_server(manifests("defaults")))["triton"]["readinessProbe"]["httpGet"]["path"]
    try:
        with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_tritonserver_has_the_flags_that_the_chart_passes(triton_installed: None) -> None:
    found = TritonInstallation.find()
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, found.library_dirs))}
    ended = subprocess.run([found.binary, "--help"], env=environment, capture_output=True, text=True)
    known = set(re.findall(r"--[\w-]+", ended.stdout + ended.stderr))
    workloads = [chart_server(manifests(case)) for case in ("defaults", "everything")]
    for workload in (*workloads, only(render(MODELS), "Deployment", name=f"{FULLNAME}-qwen2-5")):
        _, *arguments = containers(workload)["triton"]["args"]
        assert {argument.partition("=")[0] for argument in arguments} <= known


@pytest.mark.nightly  # a tritonserver and a gateway of its own
def test_one_gateway_serves_models_of_several_tritons(replica: TritonServer, tmp_path: Path) -> None:
    """As the one in front of a release with `models`.  Connections end again and again, and cut no stream off."""
    write_entry(tmp_path, "other")
    question = {"prompt": "Return a list of", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    aging = ["--grpc-max-connection-age=100"]
    with killed_at_the_end(TritonServer(tmp_path, model_control_mode="none", extra_args=aging)) as other:
        tritons = {"demo": replica.grpc_address, "other": other.grpc_address}
        front = gateway([f"{name}={address}" for name, address in tritons.items()], "--routing", "round-robin")
        front.start()
        try:
            listed = httpx.get(f"{front.url}/v1/models", timeout=20).json()["data"]
            assert [one["id"] for one in listed] == ["demo", "other"]
            for name, address in tritons.items():
                with Client(address, model=name) as client:
                    expected = client.generate(**question).text
                asked = httpx.post(f"{front.url}/v1/completions", json={"model": name, **question}, timeout=60)
                assert asked.json()["choices"][0]["text"] == expected
            assert "inflight_gateway_resumed_streams_total 0.0" in httpx.get(f"{front.url}/metrics", timeout=20).text
            assert (
                httpx.post(f"{front.url}/v1/completions", json={**question, "model": "third"}, timeout=20).status_code
                == 404
            )
        finally:
            front.stop()


def test_no_key_allows_a_caller_to_load_or_unload(replica: TritonServer) -> None:
    """With `--model-control-mode=none` the admin key makes no difference."""
    for action in ("load", "unload"):
        url = f"http://{replica.http_address}/v2/repository/models/demo/{action}"
        for headers in ({}, replica.admin_headers):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(url, b"{}", headers), timeout=20)
            assert caught.value.code == (503 if headers else 403)
    assert ready(replica) == 200


def test_the_gateways_metrics_have_what_an_endpoint_picker_reads(replica: TritonServer) -> None:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(
        GatewayOptions(
            models=("demo",),
            api_keys=("key",),
            open_metrics=True,
            triton_metrics=f"http://{replica.metrics_address}/metrics",
        ),
        ServerOptions(port=port),
    )
    with Client(replica.grpc_address, model="demo") as client:
        client.generate("Return", max_tokens=4)
    gateway.start(replica.grpc_address)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            shown = answer.read().decode()
    finally:
        gateway.stop()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"# TYPE vllm:{name} gauge" in shown
    (labels,) = re.findall(r"^vllm:num_requests_waiting\{(.*)\} 0$", shown, re.MULTILINE)
    assert 'model="demo"' in labels
    (sizes,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1$", shown, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', sizes))
    assert found["block_size"] == "16" and int(found["num_gpu_blocks"]) > 0
    assert "inflight_gateway_open_requests 0.0" in shown


def test_alive_says_so_while_the_engine_is_gone(replica: TritonServer) -> None:
    assert ready(replica) == 200 and alive(replica).returncode == 0
    engine = engine_process(replica)
    engine.suspend()
    try:
        assert alive(replica).returncode == 0, "replacing an engine that hangs is the stub's task"
    finally:
        engine.kill()
    assert alive(replica).returncode == 0
    with Client(replica.grpc_address, model="demo") as client:
        client.generate("Return", max_tokens=4)


def test_drain_ends_with_the_last_stream(replica: TritonServer) -> None:
    """The hook needs neither key nor address: it finds the stubs itself."""
    assert replica.process is not None
    paths = ":".join(str(ROOT / folder) for folder in ("tools", "client", "gateway", "backend"))
    script = (SCRIPTS / "inflight-drain").read_text()
    for ours, here in (
        ("/opt/inflight:/opt/tritonserver/backends", paths),
        ("exec python3", f"exec {sys.executable}"),
        ("drain_models(1,", f"drain_models({replica.process.pid},"),
    ):
        assert ours in script
        script = script.replace(ours, here)
    with Client(replica.grpc_address, model="demo", retries=RetryPolicy(max_attempts=1)) as client:
        engine = engine_process(replica)
        engine.suspend()  # so that the stream stays open
        try:
            stream = client.stream("Return a list of", max_tokens=30, ignore_eos=True, seed=1)
            while not json.loads(client.control("stats", admin_key=KEY))["frontend"]["open_requests"]:
                time.sleep(0.02)
            hurried = subprocess.run(["sh", "-c", script, "inflight-drain", "0"])
            assert hurried.returncode == 1, "its seconds are over"
            hook = subprocess.Popen(["sh", "-c", script, "inflight-drain", "60"])
        finally:
            engine.resume()
        *_, last = stream
        assert last.finish_reason == "length", "the open stream was left alone"
        assert hook.wait(60) == 0
        with pytest.raises(UnavailableError, match="drain"):
            client.generate("Return", max_tokens=4)
    assert alive(replica).returncode == 0, "a drained server is not a dead one"


def test_alive_finds_a_stub_that_does_not_answer_or_is_dead(replica: TritonServer) -> None:
    """Runs last, because it kills the server."""
    assert replica.process is not None
    (stub,) = stubs(replica)
    os.kill(stub, signal.SIGSTOP)
    try:
        said = alive(replica, timeout=1)
        assert said.returncode == 1 and "/models/demo/generate" in said.stderr
    finally:
        os.kill(stub, signal.SIGCONT)
    assert alive(replica, "nothing").returncode == 1
    os.kill(stub, signal.SIGKILL)
    assert alive(replica, timeout=1).returncode == 1
    replica.kill()
    said = subprocess.run(
        [sys.executable, SCRIPTS / "inflight-alive", "demo", "--port", "9"], capture_output=True, text=True
    )
    assert said.returncode == 1 and "/health/live" in said.stderr
