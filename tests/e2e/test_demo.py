"""`inflight demo` and `inflight serve` as a newcomer runs them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_repository import fake_options
from nightly import nightly_but
from processes_of import engine_process, slowed, tries
from rich.console import Console

from inflight_tools.demo import demo_requests, run_demo
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

ROOT = Path(__file__).parents[2]
ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@contextmanager
def _inflight(*arguments: str, hurried: bool = False, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a child process, stopped with SIGINT, twice if `hurried`; none of its processes survives."""
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", *arguments, *ANY_PORTS]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, **pipes)
    sessions: list[int] = []
    try:
        yield process
        sessions = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert any(len(session_members(pid)) >= 3 for pid in sessions)  # tritonserver, stub, engine
    finally:
        process.send_signal(signal.SIGINT)
        if hurried:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()[-1]) == (0, "stopped"), errors
    assert not any(session_members(pid) for pid in sessions)


@pytest.fixture
def demo(server: TritonServer) -> Iterator[TritonServer]:
    """The server with a slow engine: on a busy machine the clients of the demo mostly would join after its first
    request, which takes less than half a second."""
    with slowed(engine_process(server, "demo"), runs=0.01):
        yield server


def test_short_requests_join_after_the_first_one_and_leave_before_it(demo: TritonServer) -> None:
    def leave_before_it() -> bool:
        output = io.StringIO()
        rows = run_demo(demo, Console(file=output, width=200))
        assert [row.state for row in rows] == ["done"] * len(demo_requests())
        assert [row.tokens for row in rows] == [row.max_tokens for row in rows]
        assert all(row.text.strip() and row.ttft for row in rows)
        events = re.findall(r"request (\d) (joined|first token|left)", output.getvalue())
        order = {event: position for position, event in enumerate(events)}
        assert len(order) == 3 * len(rows)
        assert order["1", "first token"] < order["2", "joined"]
        return max(order[row, "left"] for row in ("2", "5")) < order["1", "left"]

    assert any(leave_before_it() for _ in tries()), "the batch was locked"


def test_the_table_shows_one_live_row_per_request(demo: TritonServer) -> None:
    def share_a_batch() -> bool:
        output = io.StringIO()
        run_demo(demo, Console(file=output, width=160, force_terminal=True, color_system=None))
        drawn = output.getvalue()
        assert {"waiting", "running", "done"} <= set(re.findall(r"waiting|running|done", drawn))
        assert "400/400" in drawn
        return "in the batch: 3" in drawn

    assert any(share_a_batch() for _ in tries())


def test_demo_stays_up_and_its_printed_commands_work(triton_installed: None, keeping: dict[str, str]) -> None:
    with _inflight("demo", **keeping) as process:
        assert process.stdout is not None
        printed = ""
        while "Press Ctrl-C to stop" not in printed:
            line = process.stdout.readline()
            assert line, f"the demo ended: {process.communicate()[1]}"
            printed += line
        commands = [block for block in printed.split("\n\n") if re.match(r"curl|\S*inflight|\S*python", block)]
        assert len(commands) == 4
        for command in commands:
            if command.startswith("curl") and shutil.which("curl") is None:
                continue
            answer = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert answer.returncode == 0, f"{command}\n{answer.stderr}"
            assert answer.stdout and '{"error"' not in answer.stdout, command


def test_serve_a_checkpoint_by_its_directory(triton_installed: None, tmp_path: Path) -> None:
    """With the fake engine: `inflight demo` has shown what the real one does."""
    settings = fake_options(tmp_path)
    options = ["--name", "mine", "--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory", "64MiB"]
    options += ["--set", f"python_executable={settings['python_executable']}"]
    with _inflight("serve", "--model", settings["model"], *options, "--openai-port", "0", hurried=True) as process:
        assert process.stdout is not None
        key, front, ready = (process.stdout.readline() for _ in range(3))
        assert re.match(r"ready: OpenAI's API at http://127\.0\.0\.1:\d+/v1 and a page", front), front
        assert re.match(r"admin key, .*: [\w-]{32}$", key), key
        address = re.match(r"ready: HTTP (\S+),", ready)
        assert address is not None, ready
        body = json.dumps({"text_input": "Return", "max_tokens": 3, "min_tokens": 3, "return_num_output_tokens": True})
        url = f"http://{address[1]}/v2/models/mine/generate"
        with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as response:
            assert json.load(response)["num_output_tokens"] == 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1", "smollm2-GGUF-Q4_1"])
def test_serve_a_gguf_file_and_chat(
    triton_installed: None, smollm2_gguf: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, tokenizer and chat template are the file's, which is here, or in the cache of the hub."""
    model = str(smollm2_gguf)
    if name not in model:
        model = "acme/smollm2-GGUF:Q4_1"
        home = tmp_path / "models--acme--smollm2-GGUF"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("c" * 40)
        (home / "snapshots" / ("c" * 40)).mkdir(parents=True)
        (home / "snapshots" / ("c" * 40) / smollm2_gguf.name).symlink_to(smollm2_gguf)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = ["--dtype", "float32", "--max-model-len", "1024", "--quantization", "gguf", "--load-format", "gguf"]
    with _inflight("serve", "--model", model, *options, "--openai-port", "0") as process:
        assert process.stdout is not None
        _, front, _ = (process.stdout.readline() for _ in range(3))
        address = re.match(r"ready: OpenAI's API at (http://127\.0\.0\.1:\d+/v1)", front)
        assert address is not None, front
        question = {"role": "user", "content": "What is the capital city of France? Answer in one sentence."}
        body = {"model": name, "messages": [question], "temperature": 0, "max_tokens": 20}
        request = urllib.request.Request(f"{address[1]}/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as response:
            choice = json.load(response)["choices"][0]
    assert choice["message"]["content"] == "The capital city of France is Paris." and choice["finish_reason"] == "stop"


@pytest.mark.nightly  # tests/tools/test_cli.py has a model that fails
def test_serve_a_directory_that_is_no_model_says_why(triton_installed: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", "serve", "--model", str(tmp_path)]
    ended = subprocess.run([*command, *ANY_PORTS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    *_, kept, last = ended.stderr.splitlines()
    assert last.startswith("inflight: model ")
    assert "failed to load" in last
    log = Path(kept.removeprefix("inflight: the server's log is in "))
    assert "failed to load" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("option", nightly_but(["http"], ["http", "grpc", "metrics"]))
def test_demo_with_a_port_in_use_is_one_line(server: TritonServer, option: str) -> None:
    port = server.ports[{"http": "HTTP", "grpc": "GRPC"}.get(option, option)]
    arguments = [*ANY_PORTS, f"--{option}-port", str(port)]
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", "demo", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(rf"inflight: port {port} .*change --{option}-port.*\n", ended.stderr)
