"""`inflight generate` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight_client import transport_grpc, transport_http
from inflight_client.cli import generate
from inflight_tools.ports import pick_ports

APP = typer.Typer()
APP.command()(generate)
# A test run in the background ignores SIGINT, and its children inherit that; in a terminal they do not.
RUN = (
    "import signal, typer; from inflight_client.cli import generate; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); typer.run(generate)"
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, arguments, input=stdin)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def server(address: str, protocol: str) -> list[str]:
    return ["--url", address, "--protocol", protocol, "--model", "scripted"]


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_text(server: list[str], how: str) -> None:
    assert run("naïve 漢 words here", "--max-tokens", "3", how, *server) == (0, "naïve 漢 words\n", "")


def test_the_protocol_follows_from_the_address(address: str) -> None:
    for scheme in ["", "http://"]:
        assert run("a b", "--url", scheme + address, "--model", "scripted") == (0, "a b\n", "")


def test_json(server: list[str]) -> None:
    status, out, _ = run("a b", "--json", "-n", "2", "--seed", "1", "--temperature", "0.5", *server)
    result = json.loads(out)
    assert status == 0
    assert [choice["text"] for choice in result["choices"]] == ["a b", "a b"]
    assert result["usage"] == {"input_tokens": 7, "output_tokens": 4, "cached_tokens": None}
    assert result["timings"]["ttft"] > 0


def test_several_sequences_are_lines(server: list[str]) -> None:
    assert run("a b", "-n", "2", *server) == (0, "a b\na b\n", "")


def test_chat_and_standard_input(server: list[str]) -> None:
    assert run("-", "--chat", *server, stdin="hello there") == (0, "user:hello there\n", "")


def test_an_error_of_the_server_is_one_line(server: list[str]) -> None:
    status, _, error = run("a", "--temperature", "-1", *server)
    assert (status, error) == (1, "inflight: temperature=-1 is out of range: allowed is [0, 100]\n")


def test_a_deadline_shows_the_text_so_far(server: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in (transport_grpc, transport_http):
        monkeypatch.setattr(transport, "_GRACE_SECONDS", 60.0)
    status, out, error = run('{"tokens": 100, "delay": 0.1}', "--timeout", "0.5", *server)
    assert status == 1
    assert out.startswith("t0 t1") and out.endswith("\n")
    assert error.startswith("inflight: deadline exceeded") and error.count("\n") == 1


@pytest.mark.parametrize("protocol_", ["grpc", "http"])
def test_no_server_is_one_line(protocol_: str) -> None:
    address = f"127.0.0.1:{pick_ports(1)[0]}"
    status, out, error = run("a", "--url", address, "--protocol", protocol_)
    assert (status, out) == (2, "")
    assert error.startswith(f"inflight: cannot reach {address}") and error.count("\n") == 1


def test_no_server_by_either_protocol_is_one_line() -> None:
    address = f"127.0.0.1:{pick_ports(1)[0]}"
    status, out, error = run("a", "--url", address)
    assert (status, out) == (2, "")
    assert error.startswith(f"inflight: cannot reach {address} by HTTP: ") and error.count("\n") == 1


@pytest.mark.parametrize("wrong", [["--protocol", "rest"], ["--timeout", "-1"], ["--url", "ftp://host:1"]])
def test_wrong_usage_is_one_line(wrong: list[str]) -> None:
    status, out, error = run("a", *wrong)
    assert (status, out) == (2, "")
    assert error.startswith("inflight: ") and error.count("\n") == 1


def test_what_is_not_an_address_is_one_line() -> None:
    for url in ["localhost:notaport", "localhost:99999", "[::1"]:
        for protocol_ in [[], ["--protocol", "http"]]:
            status, out, error = run("a", *protocol_, "--url", url)
            assert (status, out) == (2, "")
            assert error.startswith("inflight: url='") and url in error and error.count("\n") == 1


def test_standard_input_that_is_not_utf8_is_one_line() -> None:
    process = subprocess.run(
        [sys.executable, "-c", RUN, "-"],
        input=b"a\xffb",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert process.returncode == 2
    assert (
        process.stderr.startswith(b"inflight: standard input is not valid UTF-8") and process.stderr.count(b"\n") == 1
    )


def test_a_full_disk_is_one_line(server: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps({"tokens": 3}), *server], stdout=full, stderr=subprocess.PIPE
        )
    assert process.returncode == 1
    assert process.stderr == b"inflight: cannot write the output: No space left on device\n"


def test_ctrl_c_cancels(server: list[str], seen: Callable[..., dict[str, Any]], key: str) -> None:
    process = start(json.dumps({"key": key, "tokens": 1000, "delay": 0.02}), "--max-tokens", "1000", *server)
    assert process.stdout is not None
    assert process.stdout.read(2) == "t0"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "inflight: cancelled\n")
    seen(key, lambda report: report["cancelled"] == 1)
