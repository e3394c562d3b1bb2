"""The command line: validation before anything starts, the entries it writes, Ctrl-C, exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from processes_of import command_line, members_with
from typer.testing import CliRunner

import inflight
from inflight.config import ConfigError, EngineConfig
from inflight.model_json import read_model_json
from inflight_tools import cli, foreground, launcher
from inflight_tools.installation import find_wheel
from inflight_tools.processes import session_members
from inflight_tools.repository import default_name, resolve_model, write_entry

needs_server = pytest.mark.skipif(find_wheel() is None, reason="nvidia-pytriton is not installed")


class RecordingServer:
    """Replaces TritonServer where only its arguments matter."""

    made: ClassVar[list[RecordingServer]] = []

    def __init__(self, repository: Path, **options: Any) -> None:
        self.options, self.admin_key = options, options["admin_key"]
        files = [path for path in Path(repository).rglob("*") if path.is_file()]
        self.files = {str(path.relative_to(repository)): path.read_text() for path in files}
        RecordingServer.made.append(self)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[RecordingServer]:
    RecordingServer.made = []
    monkeypatch.setattr(launcher, "TritonServer", RecordingServer)

    def run(server: Any, timeout: float, gateway: Any, stub_timeout: float | None, *shown: Any) -> None:
        server.options.update(timeout=timeout, gateway=gateway, stub_timeout=stub_timeout)

    monkeypatch.setattr(foreground, "run_in_foreground", run)
    return RecordingServer.made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.pbtxt").touch()
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "My Checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys, inflight_tools.cli; print([m for m in ('torch', 'transformers', 'pytriton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_version_and_the_short_form_of_help() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"inflight {inflight.__version__}\n"
    assert "Serve a checkpoint" in CliRunner().invoke(cli.app, ["serve", "-h"]).output


def test_wrong_usage_is_one_line_and_status_2(
    servers: list[RecordingServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in [
        ([], "give a model, or --model-repository"),
        (["a/b", "--model", "a/c"], "'a/b' and --model 'a/c' both name a model: give one of them"),
        (["--model-repository", "nowhere"], "--model-repository nowhere: no such directory"),
        (["--model-repository", "."], "--model-repository .: no model there; `inflight init . --model"),
        (["--model", "/no/such/dir"], "model='/no/such/dir': no such directory or file"),
        (["--model", "two words"], "model='two words': no such directory or file, and not a hub id"),
        (["--model", "missing.gguf"], "model='missing.gguf': no such file"),
        (["--model", "."], "no config.json in that directory"),
        (["--model", "a/b", "--max-num-seqs", "0"], "max_num_seqs=0: Expected `int` >= 1"),
        (["--model", "a/b", "--dtype", "int4"], "dtype='int4'"),
        (["--model", "a/b", "--kv-cache-memory", "lots"], "cannot read 'lots' as a size"),
        (
            ["--model", "a/b", "--set", "max_queue_sise=4"],
            "unknown key 'max_queue_sise'; did you mean",
        ),
        (["--model", "a/b", "--set", "seed"], "--set 'seed': expected KEY=VALUE"),
        (["--model", "a/b", "--set", "max_queue_size=many"], "max_queue_size='many': Expected `int`"),
        (["--model", "a/b", "--name", "../up"], "name='../up': a model name starts with"),
        (["--model", "a/b", "--load-model", "x"], "--load-model requires --model-repository"),
        (["--model-repository", ".", "--model", "a/b"], "--model cannot be combined with --model-repository"),
        (
            ["--model-repository", ".", "--max-num-seqs", "4"],
            "--max-num-seqs cannot be combined with --model-repository",
        ),
        (
            ["--model-repository", ".", "--no-openai", "--otlp-traces-endpoint", "http://collector:4318"],
            "--otlp-traces-endpoint cannot be combined with --model-repository; edit the model.json there",
        ),
        (["--model", "a/b", "--otlp-traces-endpoint", "collector:4317"], "give a URL of a collector"),
    ]:
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(cli.app, ["serve", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert servers == []


def test_serve_writes_only_what_differs_from_the_defaults(checkpoint: Path, servers: list[RecordingServer]) -> None:
    arguments = [str(checkpoint), "--max-num-seqs", "8", "--block-size", "16", "--dtype", "bfloat16"]
    arguments += ["--set", "seed=7", "--set", "enable_prefix_caching=false", "--set", "chat_template={{ x }}"]
    result = CliRunner().invoke(cli.app, ["serve", *arguments, "--port", "0", "--host", "127.0.0.2"])
    assert result.exit_code == 0, result.output
    (server,) = servers
    assert server.options["http_port"] == 0
    assert server.options["grpc_port"] == 8001
    assert server.options["host"] == "127.0.0.2"
    assert set(server.files) == {"My-Checkpoint/config.pbtxt", "My-Checkpoint/1/model.json"}
    assert 'backend: "inflight"' in server.files["My-Checkpoint/config.pbtxt"]
    assert json.loads(server.files["My-Checkpoint/1/model.json"]) == {
        "model": str(checkpoint),
        "max_num_seqs": 8,  # the given block_size is the default
        "dtype": "bfloat16",
        "seed": 7,
        "enable_prefix_caching": False,
        "chat_template": "{{ x }}",
    }


def test_serve_of_a_repository_loads_only_the_named_models(repository: Path, servers: list[RecordingServer]) -> None:
    arguments = ["--model-repository", str(repository), "--load-model", "a", "--load-model", "b"]
    assert CliRunner().invoke(cli.app, ["serve", *arguments]).exit_code == 0
    assert servers[0].options["model_control_mode"] == "explicit"
    assert servers[0].options["load_models"] == ["a", "b"]


def test_init_writes_an_entry_that_reads_back(tmp_path: Path, checkpoint: Path) -> None:
    arguments = ["init", str(tmp_path / "repository"), "--model", str(checkpoint), "--name", "mine"]
    result = CliRunner().invoke(cli.app, [*arguments, "--set", "max_model_len=64"])
    assert result.exit_code == 0, result.output
    config = read_model_json(tmp_path / "repository" / "mine" / "1" / "model.json")
    assert config == EngineConfig(model=str(checkpoint), max_model_len=64)
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 2
    assert "already exists" in again.stderr


def test_init_writes_paths_that_survive_moving_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "far" / "away"
    for name in ("weights/tiny", "words"):
        (repository / name).mkdir(parents=True)
        (repository / name / "config.json").write_text("{}")
    monkeypatch.chdir(repository)
    arguments = ["init", ".", "--model", "weights/tiny", "--name", "mine", "--set", "tokenizer=words"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((repository / "mine" / "1" / "model.json").read_text())
    assert written == {"model": "../../weights/tiny", "tokenizer": "../../words"}
    monkeypatch.chdir("/")
    elsewhere.parent.mkdir()
    repository.rename(elsewhere)
    config = read_model_json(elsewhere / "mine" / "1" / "model.json")
    assert (config.model, config.tokenizer) == (str(elsewhere / "weights" / "tiny"), str(elsewhere / "words"))


def test_without_the_launchers_packages_the_command_line_says_what_to_install(repository: Path) -> None:
    code = (
        "import sys; sys.modules['psutil'] = None\n"
        "from inflight_tools.cli import app; app(['serve', '--model-repository', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(repository)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = "inflight: psutil not found; it is needed to start a server: pip install 'triton-inflight[server]'\n"
    assert done.stderr == said


def test_default_name() -> None:
    for model, name in [
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/models/my model/", "my-model"),
        ("gpt2", "gpt2"),
        ("/", "model"),
        ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
    ]:
        assert default_name(model) == name


def test_a_gguf_file_is_named_by_its_path_or_beside_the_entry(tmp_path: Path) -> None:
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.touch()
    assert resolve_model(str(file)) == str(file)
    inside = write_entry(tmp_path / "models", "tiny", EngineConfig(model=str(file)))
    assert json.loads((inside / "1" / "model.json").read_text()) == {"model": "../../tiny.gguf"}
    assert read_model_json(inside / "1" / "model.json").model == str(file)
    outside = write_entry(tmp_path / "others", "tiny", EngineConfig(model=str(file)))
    assert json.loads((outside / "1" / "model.json").read_text()) == {"model": str(file)}
    with pytest.raises(ConfigError, match=rf"no config.json in that directory; .*, or the file itself: {file}"):
        resolve_model(str(file.parent))


def test_a_file_without_the_ending_of_gguf_is_named_by_its_whole_path(tmp_path: Path) -> None:
    """As in the caches of other programs, and of the hub, where links lead to files without one."""
    file = tmp_path / "blobs" / "sha256-12"
    file.parent.mkdir()
    file.touch()
    (tmp_path / "tiny.gguf").symlink_to(file)
    for name, given in (("direct", file), ("linked", tmp_path / "tiny.gguf")):
        entry = write_entry(tmp_path, name, EngineConfig(model=resolve_model(str(given))))
        assert read_model_json(entry / "1" / "model.json").model == str(file)


def test_an_entry_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*Not a directory"):
        write_entry(tmp_path / "file", "name", EngineConfig(model="a/b"))


def _run(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_a_port_in_use_is_one_line_and_status_1(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(
            cli.app, ["serve", "--model-repository", str(repository), "--http-port", str(port), "--grpc-port", "0"]
        )
    assert result.exit_code == 1
    assert result.stdout == "", "no key of a server that does not serve"
    assert result.stderr.splitlines() == [
        f"inflight: port {port} (HTTP) on 127.0.0.1: Address already in use; change --http-port (0 picks a free port)"
    ]


FOREGROUND = """
import sys
import typer
from inflight_tools.foreground import run_in_foreground
from inflight_tools.launcher import TritonServer
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.ports import pick_ports

class Server(TritonServer):
    def start(self):
        super().start()
        print(self.process.pid, flush=True)

def main(repository: str, backend: str, with_gateway: int) -> None:
    server = Server(repository, backend_dir=backend, metrics_port=0, exit_timeout=5)
    options = ServerOptions(port=pick_ports(1)[0], exit_timeout=2)
    run_in_foreground(server, 60, GatewayProcess(GatewayOptions(), options) if with_gateway else None)

typer.run(main)
"""
BACKEND = """
import time

class TritonPythonModel:
    def initialize(self, args):
        if args["model_name"] == "broken":
            raise ValueError("no weights")
    def execute(self, requests):
        time.sleep(600)
"""


def _foreground(tmp_path: Path, model: str, with_gateway: bool = False) -> subprocess.Popen[str]:
    (tmp_path / "repository" / model / "1").mkdir(parents=True)
    (tmp_path / "repository" / model / "config.pbtxt").write_text(
        'backend: "inflight"\nmax_batch_size: 0\n'
        'input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }\noutput { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "model.py").write_text(BACKEND)
    (tmp_path / "temporary").mkdir()
    arguments = [str(tmp_path / "repository"), str(tmp_path / "backend"), str(int(with_gateway))]
    return _run(FOREGROUND, *arguments, TMPDIR=str(tmp_path / "temporary"))


@pytest.mark.nightly  # tests/e2e/test_stopping.py and test_demo.py stop one under load, and with a gateway
@needs_server
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_ends_everything_with_status_0(tmp_path: Path, number: signal.Signals) -> None:
    with _foreground(tmp_path, "idle") as process:
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline().startswith("ready: HTTP 127.0.0.1:")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert session_members(pid) == []
    assert errors.splitlines() == ["idle: starting its process", "idle: loaded", "stopped"]
    assert "Traceback" not in errors


@needs_server
def test_a_model_that_fails_is_status_1_with_its_reason_last(tmp_path: Path) -> None:
    with _foreground(tmp_path, "broken") as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    started, kept, reason = errors.splitlines()
    assert (started, reason) == (
        "broken: starting its process",
        "inflight: model 'broken' failed to load: ValueError: no weights",
    )
    log = Path(kept.removeprefix("inflight: the server's log is in "))
    assert log.parent == tmp_path / "temporary" and "failed to load 'broken'" in log.read_text()
    assert list(log.parent.iterdir()) == [log], "nothing else is left"
    assert session_members(int(output)) == []


def _ready(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Process id and addresses of the server, and the address of its gateway, once it is ready."""
    assert process.stdout is not None
    pid, front, said = int(process.stdout.readline()), process.stdout.readline(), process.stdout.readline()
    gateway = re.match(r"ready: OpenAI's API at (http://127.0.0.1:\d+)/v1 and a page for browsers at (\S+)/$", front)
    assert gateway is not None and gateway[1] == gateway[2], front
    address = re.match(r"ready: HTTP (127.0.0.1:\d+), gRPC (\S+), metrics (\S+);", said)
    assert address is not None, said
    return pid, said, gateway[1]


def _hanging_request(address: str) -> subprocess.Popen[str]:
    """A client whose answer never comes; ends when its connection does."""
    code = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1])
tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
connection.request("POST", "/v2/models/idle/infer", json.dumps({"inputs": [tensor]}))
print("sent", flush=True)
try:
    print(connection.getresponse().status)
except (OSError, http.client.HTTPException) as error:
    print(type(error).__name__)
"""
    client = _run(code, address)
    assert client.stdout is not None and client.stdout.readline() == "sent\n"
    return client


@needs_server
def test_everything_ends_with_status_3_when_a_stub_dies(tmp_path: Path) -> None:
    """Triton itself would keep reporting "ready" after its stub's death, and let every request hang."""
    with _foreground(tmp_path, "idle", with_gateway=True) as process:
        pid, said, front = _ready(process)
        with urllib.request.urlopen(f"{front}/v1/models", timeout=20) as answer:
            assert json.load(answer)["data"] == [], "no model takes text"
        (gateway,) = [p for p in psutil.Process(process.pid).children() if "inflight_gateway" in command_line(p)]
        client = _hanging_request(said.split()[2].rstrip(","))
        (stub,) = members_with(pid, b"python_backend_stub")
        os.kill(stub, signal.SIGKILL)
        ended, _ = client.communicate(timeout=30)  # long before the 600 s of its request
        _, errors = process.communicate(timeout=60)
    assert ended in ("RemoteDisconnected\n", "ConnectionResetError\n", "500\n")  # the last if Triton noticed first
    assert process.returncode == 3
    assert errors.splitlines()[-1] == (
        "inflight: the stub process of model 'idle' died (SIGKILL), and its streams would hang"
    )
    assert session_members(pid) == [] and not gateway.is_running()


def test_serve_starts_a_gateway_beside_the_server(repository: Path, servers: list[RecordingServer]) -> None:
    keys = repository / "keys"
    keys.write_text("# ours\nfile-key\n\n")
    arguments = ["serve", "--model-repository", str(repository), "--openai-port", "0", "--openai-workers", "2"]
    keyed = ["--api-key", "one-key", "--api-key-file", str(keys), "--tool-call-parser", "hermes"]
    asked = ["--strict", "--allowed-origin", "https://page.example", "--admin-key", "a-key-of-16-chars"]
    asked += ["--otlp-traces-endpoint", "http://collector"]
    assert CliRunner().invoke(cli.app, [*arguments, *keyed, *asked]).exit_code == 0
    beside = servers[0].options["gateway"]
    assert beside._options.otlp_traces_endpoint == "http://collector"
    assert beside._options.strict and beside._options.cors_origins == ("https://page.example",)
    assert beside._options.api_keys == ("one-key", "file-key") and beside._options.tool_call_parser == "hermes"
    assert beside._options.headers == {"triton-grpc-protocol-inflight-admin-key": "a-key-of-16-chars"}
    assert beside._options.page and beside._options.admin_key == "a-key-of-16-chars"
    assert beside._server.workers == 2 and beside._server.port > 0 and str(beside._server.port) in beside.url
    assert CliRunner().invoke(cli.app, [*arguments, "--no-page"]).exit_code == 0
    assert servers[1].options["gateway"].page_url is None
    keys.write_text("# none\n")
    ended = CliRunner().invoke(cli.app, [*arguments, "--api-key-file", str(keys)])
    assert ended.exit_code == 2 and "has no keys" in ended.output


def test_the_gateway_command_checks_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr("inflight_gateway.server.run", lambda *options: started.append(options))
    arguments = ["gateway", "--triton", "a:1", "--triton", "b:2", "--port", "9001", "--workers", "3", "--strict"]
    ended = CliRunner().invoke(cli.app, [*arguments, "--request-timeout", "0", "--allowed-origin", "*"])
    assert ended.exit_code == 0 and "http://127.0.0.1:9001/v1" in ended.output
    ((options, server),) = started
    assert options.triton == ("a:1", "b:2") and options.request_timeout is None and options.strict
    assert (server.port, server.workers, options.cors_origins) == (9001, 3, ("*",))
    for wrong in (["--ssl-keyfile", str(tmp_path)], ["--api-key", "a b"], ["--api-key-file", str(tmp_path / "no")]):
        assert CliRunner().invoke(cli.app, [*arguments, *wrong]).exit_code == 2


def test_without_extras_a_command_runs_or_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    """`pip install triton-inflight` alone has none of the packages below."""
    absent = "torch transformers tokenizers safetensors huggingface_hub jinja2 llguidance ahocorasick_rs regex"
    absent += " pytriton psutil starlette uvicorn httptools uvloop prometheus_client uhashring orjson zmq redis"
    needed = {
        "weights": None,
        "simulate --profile demo-cpu --requests 3": None,
        "quantize m -o q": "backend",
        "serve m": "server",
        "gateway": "gateway",
    }
    program = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({absent.split()!r}))
from inflight_tools.cli import app
ended = []
for arguments in {[*needed]!r}:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            app(arguments.split())
        except SystemExit as status:
            ended.append((status.code, errors.getvalue()))
print(json.dumps(ended))
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "INFLIGHT_CACHE": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    for (arguments, extra), (status, errors) in zip(needed.items(), json.loads(found.stdout), strict=True):
        if extra is None:
            assert (status, errors) == (0, ""), arguments
        else:
            assert (status, errors.count("\n")) == (1, 1), arguments
            assert f"pip install 'triton-inflight[{extra}]'" in errors


def test_the_list_of_commands_says_what_each_does_in_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ([], ["adapters"]):
        lines = CliRunner().invoke(cli.app, [*arguments, "--help"]).output.split("Commands:")[1].splitlines()
        assert [line for line in lines if line.endswith("...")] == [], "cut off"
