"""`inflight serve`: flags of `vllm serve`, and OpenAI's API beside the server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inflight_tools import cli, foreground, launcher, openai_beside
from inflight_tools.ports import pick_ports


class Started:
    """Replaces TritonServer; what `serve` would have started."""

    seen: dict[str, Any]

    def __init__(self, repository: Path, *, admin_key: str | None, **options: Any) -> None:
        self.admin_key = admin_key
        Started.seen = {"settings": json.loads(next(Path(repository).rglob("model.json")).read_text())}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run(server: Any, timeout: float, gateway: Any, stub_timeout: float | None, *shown: Any) -> None:
        Started.seen["gateway"] = gateway

    Started.seen = {}
    monkeypatch.setattr(launcher, "TritonServer", Started)
    monkeypatch.setattr(foreground, "run_in_foreground", run)
    monkeypatch.setattr(openai_beside, "_PORT", pick_ports(1)[0])
    yield


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["serve", *arguments])


def test_flags_of_vllm_serve_are_keys(checkpoint: str) -> None:
    flags = ["--max-model-len", "512", "--served-model-name", "mine", "--kv-cache-dtype=fp8", "-tp", "1"]
    flags += ["--no-enable-prefix-caching", "--enforce-eager", "-q", "int8", "--seed", "-1", "--async-scheduling"]
    flags += ["--enable-auto-tool-choice", "--disable-log-requests", "--generation-config", "vllm"]
    ended = serve(*flags, checkpoint, "--gpu-memory-utilization", "0.5", "--dtype", "half")
    assert ended.exit_code == 0, ended.output
    found = Started.seen["settings"]
    expected = {
        "max_model_len": 512, "kv_cache_dtype": "fp8", "enable_prefix_caching": False, "quantization": "int8",
        "seed": -1,
        "enforce_eager": True, "async_scheduling": True, "gpu_memory_utilization": 0.5, "dtype": "float16",
        "generation_config": "vllm",
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tensor-parallel-size", "2"], "tensor_parallel_size=2 is not supported: this engine runs on one device"),
        (["-tp", "2"], "tensor_parallel_size=2 is not supported"),
        (["--lora-modules"], "--lora-modules needs values such as NAME=FOLDER"),
        (["--lora-modules", "a=/nowhere"], "no adapter_config.json in /nowhere"),
        (["--lora-modules", "=b"], "expected NAME=FOLDER"),
        (["--lora-modules", '{"name": "a=b", "path": "c"}'], "a name contains no '='; choose another"),
        (["--lora-modules", '{"name": "a"}'], 'expected NAME=FOLDER, or {"name": "...", "path": "..."}'),
        (["--model-repository", ".", "--lora-module", "a=b"], "--lora-module cannot be combined"),
        (["--ssl-ca-certs", "ca.pem"], "--ssl-ca-certs is an option of vllm serve: certificates of clients"),
        (["--http-prot", "9"], "No such option: --http-prot"),
        (["--swap-space"], "--swap-space needs a value"),
        (["--model-repository", ".", "--seed", "3"], "--set cannot be combined with --model-repository"),
    ],
)
def test_what_is_refused_says_what_to_do(checkpoint: str, flags: list[str], says: str) -> None:
    given = flags if "--model-repository" in flags else [checkpoint, *flags]
    ended = serve(*given)
    assert ended.exit_code == 2 and says in " ".join(ended.output.split()), ended.output
    assert Started.seen == {}


def test_openais_api_is_on_by_default_on_loopback_only(checkpoint: str) -> None:
    for arguments in ([], ["--host", "0.0.0.0"]):
        assert serve(checkpoint, *arguments).exit_code == 0
        assert Started.seen["gateway"].url == f"http://127.0.0.1:{openai_beside._PORT}/v1"
    assert serve(checkpoint, "--no-openai").exit_code == 0
    assert Started.seen["gateway"] is None


def test_a_busy_default_port_stops_no_server_and_a_chosen_one_does(checkpoint: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = openai_beside._PORT = busy.getsockname()[1]
        said = f"port {port} (OpenAI) on 127.0.0.1: Address already in use; change --openai-port (0 picks a free port)"
        ended = serve(checkpoint)
        assert (ended.exit_code, Started.seen["gateway"]) == (0, None)
        assert ended.stderr == f"without OpenAI's API: {said}\n"
        for chosen in (["--openai-port", str(port)], ["--openai-host", "127.0.0.1"]):
            ended = serve(checkpoint, *chosen)
            assert (ended.exit_code, ended.stderr) == (1, f"inflight: {said}\n")


def test_a_port_for_two_services(checkpoint: str) -> None:
    port = str(openai_beside._PORT)
    ended = serve(checkpoint, "--http-port", port)
    assert ended.exit_code == 0 and "given to more than one service" in ended.stderr
    ended = serve(checkpoint, "--http-port", port, "--openai-port", port)
    assert ended.exit_code == 1 and "given to more than one service; change --openai-port" in ended.stderr


def test_without_the_gateways_packages(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_beside.importlib.util, "find_spec", lambda name: None)
    ended = serve(checkpoint)
    assert ended.exit_code == 0 and "pip install 'triton-inflight[gateway]'" in ended.stderr
    assert Started.seen["gateway"] is None


def test_https_and_another_address(checkpoint: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.touch(), certificate.touch()
    files = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    assert serve(checkpoint, *files, "--openai-host", "127.0.0.2", "--openai-port", "0").exit_code == 0
    gateway = Started.seen["gateway"]
    assert gateway.url.startswith("https://127.0.0.2:") and gateway._server.ssl_certfile == str(certificate)
    assert serve(checkpoint, "--host", "127.0.0.3", "--openai-port", "0").exit_code == 0
    assert Started.seen["gateway"].url.startswith("http://127.0.0.3:")
    for wrong in (files[:2], [*files[:3], "/no/such/file"]):
        assert serve(checkpoint, *wrong).exit_code == 2


def test_completion_of_the_shell() -> None:
    ended = CliRunner().invoke(
        cli.app,
        [],
        prog_name="inflight",
        env={"_INFLIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "inflight se", "COMP_CWORD": "1"},
    )
    assert ended.output.split() == ["serve"]
    assert "--show-completion" in CliRunner().invoke(cli.app, ["--help"]).output
