"""`inflight demo` and `inflight serve` as a newcomer runs them."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from inflight_tools.demo import demo_requests, run_demo
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

ROOT = Path(__file__).parents[2]
ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@contextmanager
def _inflight(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a child process, stopped with SIGINT; none of its processes may survive."""
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", *arguments, *ANY_PORTS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    sessions: list[int] = []
    try:
        yield process
        sessions = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert any(len(session_members(pid)) >= 3 for pid in sessions)  # tritonserver, stub, engine
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert not any(session_members(pid) for pid in sessions)


# The first request of the demo takes less than half a second: a client that another process keeps from its
# core for that long joins too late, and shows nothing.  A batch that is locked fails every time.
_ATTEMPTS = 4


def test_short_requests_join_after_the_first_one_and_leave_before_it(server: TritonServer) -> None:
    overlaps = []
    for _ in range(_ATTEMPTS):
        output = io.StringIO()
        rows = run_demo(server, Console(file=output, width=200))
        assert [row.state for row in rows] == ["done"] * len(demo_requests())
        assert [row.tokens for row in rows] == [row.max_tokens for row in rows]
        assert all(row.text.strip() and row.ttft for row in rows)
        events = re.findall(r"request (\d) (joined|first token|left)", output.getvalue())
        order = {event: position for position, event in enumerate(events)}
        assert len(order) == 3 * len(rows)
        assert order["1", "first token"] < order["2", "joined"]
        overlaps.append([order[row, "left"] < order["1", "left"] for row in ("2", "5")])
        if all(overlaps[-1]):
            return
    pytest.fail(f"requests 2 and 5 did not leave before request 1: {overlaps}")


def test_the_table_shows_one_live_row_per_request(server: TritonServer) -> None:
    for _ in range(_ATTEMPTS):
        output = io.StringIO()
        run_demo(server, Console(file=output, width=160, force_terminal=True, color_system=None))
        drawn = output.getvalue()
        assert {"waiting", "running", "done"} <= set(re.findall(r"waiting|running|done", drawn))
        assert len(re.findall(r"400/400", drawn)) >= 1
        if "in the batch: 3" in drawn:
            return
    pytest.fail("there were never three requests in the batch")


def test_demo_stays_up_and_its_printed_commands_work(triton_installed: None) -> None:
    with _inflight("demo") as process:
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


def test_serve_a_checkpoint_by_its_directory(triton_installed: None) -> None:
    checkpoint = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
    options = ["--name", "mine", "--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory", "64MiB"]
    with _inflight("serve", "--model", str(checkpoint), *options) as process:
        assert process.stdout is not None
        key, ready = process.stdout.readline(), process.stdout.readline()
        assert re.match(r"admin key, .*: [\w-]{32}$", key), key
        address = re.match(r"ready: HTTP (\S+),", ready)
        assert address is not None, ready
        body = json.dumps({"text_input": "Return", "max_tokens": 3, "min_tokens": 3, "return_num_output_tokens": True})
        url = f"http://{address[1]}/v2/models/mine/generate"
        with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as response:
            assert json.load(response)["num_output_tokens"] == 3


def test_serve_a_directory_that_is_no_model_says_why(triton_installed: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", "serve", "--model", str(tmp_path)]
    ended = subprocess.run([*command, *ANY_PORTS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("inflight: model ")
    assert "failed to load" in last


@pytest.mark.parametrize("option", ["http", "grpc", "metrics"])
def test_demo_with_a_port_in_use_is_one_line(server: TritonServer, option: str) -> None:
    port = server.ports[{"http": "HTTP", "grpc": "GRPC"}.get(option, option)]
    arguments = [*ANY_PORTS, f"--{option}-port", str(port)]
    command = [sys.executable, "-c", "from inflight_tools.cli import app; app()", "demo", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(rf"inflight: port {port} .*change --{option}-port.*\n", ended.stderr)
