"""Commands find the server of this machine and its only model, and `inflight chat` holds a conversation."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight_client import command_client, local_servers
from inflight_client.chat import chat
from inflight_client.cli import generate
from inflight_client.errors import InflightError, ServerError
from inflight_client.local_servers import announced, key_of
from inflight_tools.launcher import TritonServer

APP = typer.Typer()
APP.command()(chat)
APP.command()(generate)
CHAT = (
    "import signal, typer; from inflight_client.chat import chat; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); typer.run(chat)"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(command_client.ADMIN_KEY, raising=False)
    return tmp_path / "inflight"


def test_the_key_of_a_server_of_this_user(folder: Path) -> None:
    with announced(["127.0.0.1:8000", "0.0.0.0:8001"], "the key"):
        (file,) = folder.iterdir()
        assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
        for url in ("127.0.0.1:8000", "localhost:8001", "http://localhost:8000", "grpc://127.0.0.1:8001"):
            assert key_of(url) == "the key"
        for url in ("127.0.0.1:8002", "10.0.0.1:8000", "nonsense"):
            assert key_of(url) is None
        file.write_text("[")
        assert key_of("127.0.0.1:8000") is None
    assert not folder.exists()


def test_a_server_that_was_killed_is_forgotten(folder: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    folder.mkdir(mode=0o700)
    (folder / f"{ended.pid}.json").write_text(json.dumps({"addresses": ["127.0.0.1:1"], "admin_key": "old"}))
    assert key_of("127.0.0.1:1") is None and list(folder.iterdir()) == []


@pytest.mark.parametrize("what", ["open", "link", "file", "no folder"])
def test_a_folder_that_others_can_write_to_is_not_used(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif what == "link":
        folder.symlink_to(elsewhere)
    elif what == "file":
        folder.touch()
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nowhere")
    with announced(["127.0.0.1:8000"], "the key"):
        assert list(elsewhere.iterdir()) == [] and key_of("127.0.0.1:8000") is None


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([], "no model is ready"),
        ([{"name": "a", "state": "UNAVAILABLE"}], "no model is ready"),
        ([{"name": n, "state": "READY"} for n in "ba"], "name one of the server's models with --model: a, b"),
        (ServerError("restricted"), "name the model with --model: .*INFLIGHT_ADMIN_KEY.*restricted"),
    ],
)
def test_no_only_model(index: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def models(*arguments: Any) -> Any:
        if isinstance(index, Exception):
            raise index
        return index

    monkeypatch.setattr(command_client, "models_at", models)
    with pytest.raises(InflightError, match=says):
        command_client.sole_model(None, "grpc")


def test_the_only_model_is_asked(address: str, protocol: str) -> None:
    ended = CliRunner().invoke(APP, ["generate", "a b", "--url", address, "--protocol", protocol])
    assert (ended.exit_code, ended.stdout) == (0, "a b\n")


def test_one_message_on_standard_input(scripted: TritonServer) -> None:
    arguments = ["chat", "--url", scripted.grpc_address, "--system", "be kind"]
    ended = CliRunner().invoke(APP, arguments, input="hello there")
    assert (ended.exit_code, ended.stdout) == (0, "system:be kind user:hello there\n")
    ended = CliRunner().invoke(APP, [*arguments, "--temperature", "-1"], input="hello")
    assert (ended.exit_code, ended.stderr) == (1, "inflight: temperature=-1 is out of range: allowed is [0, 100]\n")


class Terminal:
    """`inflight chat` in a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-c", CHAT, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Its output up to the match of a pattern."""
        while (found := re.search(pattern, self._seen, re.DOTALL)) is None:
            self._seen += self._read()
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def _read(self) -> str:
        try:
            return os.read(self._ours, 65536).decode()
        except OSError:
            pytest.fail(f"it ended: {self._seen!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def chatting(*arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_conversation(scripted: TritonServer, seen: Callable[..., dict[str, Any]], key: str) -> None:
    with chatting("--url", scripted.grpc_address, "--max-tokens", "100") as terminal:
        assert "scripted: /reset forgets" in terminal.until("> ")
        terminal.type("one\n")
        assert "user:one\r\n" in terminal.until("\n> ")
        terminal.type("two\n")
        assert "user:one assistant:user:one user:two\r\n" in terminal.until("\n> ")
        terminal.type("/what\n")
        assert "/what: no such command; /reset" in terminal.until("\n> ")
        terminal.type("/reset\n")
        terminal.until("\n> ")
        terminal.type("three\n")
        assert "\nuser:three\r\n" in terminal.until("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0


def test_ctrl_c_stops_the_answer_only(scripted: TritonServer) -> None:
    words = " ".join(f"w{k}" for k in range(2000))
    with chatting("--url", scripted.grpc_address, "--max-tokens", "100000", "--system", words) as terminal:
        terminal.until("> ")
        terminal.type("one\n")
        terminal.until("w1")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\n> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(timeout=30) == 0


def test_the_command_line_has_them() -> None:
    from inflight_tools.cli import app

    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(f"\n  {name} " in shown for name in ("chat", "models", "generate")) and local_servers.__all__
