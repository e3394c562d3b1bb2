"""The admin key of `serve` and `demo`: chosen, made or none; and the headers that Triton must pass on."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from inflight_tools import admin, cli, demo, foreground, launcher
from inflight_tools.launcher import LauncherError, TritonServer
from inflight_tools.tenant_headers import forward_arguments

KEY = "k" * 16


class Recorded(Exception):
    """Ends a command whose server is ready."""

    keys: ClassVar[list[str | None]] = []


class ReadyServer:
    """Replaces TritonServer where only its key matters."""

    http_address = grpc_address = metrics_address = "127.0.0.1:1"

    def __init__(self, repository: Path, admin_key: str | None, **options: Any) -> None:
        self.admin_key = admin_key
        Recorded.keys.append(admin_key)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    @contextlib.contextmanager
    def started(*arguments: Any) -> Iterator[Callable[[], None]]:
        yield lambda: None

    def end(*arguments: Any) -> None:
        raise Recorded

    def run(*arguments: str, **environment: str) -> Result:
        Recorded.keys = []
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "config.pbtxt").touch()
        folder = ["--model-repository", str(tmp_path), *(["--no-openai"] if arguments[0] == "serve" else [])]
        return CliRunner().invoke(cli.app, [*arguments, *folder], env=environment)

    monkeypatch.delenv(admin.ENVIRONMENT, raising=False)
    monkeypatch.setattr(launcher, "TritonServer", ReadyServer)
    monkeypatch.setattr(foreground, "started", started)
    monkeypatch.setattr(foreground, "run_until_death", end)
    monkeypatch.setattr(demo, "run_demo", end)
    return run


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_key_is_made_and_printed_once(run: Any, command: str) -> None:
    first, second = run(command).output, run(command).output
    (key,) = Recorded.keys
    assert key is not None
    assert len(key) == 32
    assert second.count(key) == 1
    assert re.search(rf"admin key, .*: {re.escape(key)}\n", second)
    assert key not in first


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_key_may_be_chosen_and_is_not_printed(run: Any, command: str) -> None:
    for result in (run(command, "--admin-key", KEY), run(command, INFLIGHT_ADMIN_KEY=KEY)):
        assert Recorded.keys == [KEY]
        assert KEY not in result.output


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_no_key_only_if_asked_for(run: Any, command: str) -> None:
    run(command, "--unrestricted")
    assert Recorded.keys == [None]
    both = run(command, "--unrestricted", INFLIGHT_ADMIN_KEY=KEY)
    assert both.exit_code == 2
    assert "exclude each other" in both.output
    assert Recorded.keys == []


def test_a_key_that_triton_cannot_take_is_refused(run: Any) -> None:
    for key in ["short", "k" * 15, "k" * 257, "a key with some spaces", KEY + ",", KEY + "=", KEY + ":"]:
        refused = run("serve", "--admin-key", key)
        assert refused.exit_code == 2
        assert "16 to 256 characters" in refused.output
        with pytest.raises(LauncherError, match="16 to 256 characters"):
            TritonServer(".", admin_key=key)


def test_made_keys_are_taken() -> None:
    for _ in range(100):
        admin.check_key(admin.new_key())


def test_the_servers_environment_has_its_key_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server without a key must not answer to one that this process happens to have."""
    monkeypatch.setenv(admin.ENVIRONMENT, KEY)
    monkeypatch.setattr(launcher, "lay_out_interpreter", lambda folder: folder)
    for number, (key, expected) in enumerate([(None, None), (KEY[:-1] + "x", KEY[:-1] + "x")]):
        server = TritonServer(tmp_path, admin_key=key)
        server._runtime_dir = tmp_path / str(number)
        server._runtime_dir.mkdir()
        installation: Any = type("Installation", (), {"library_dirs": ()})
        assert server._environment(installation, Path("libpython.so")).get(admin.ENVIRONMENT) == expected


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=3"])
def test_the_server_returns_memory_unless_the_operator_says_how(
    own: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "lay_out_interpreter", lambda folder: folder)
    server = TritonServer(tmp_path, env={} if own is None else {"GLIBC_TUNABLES": own})
    server._runtime_dir = tmp_path
    env = server._environment(type("Installation", (), {"library_dirs": ()}), Path("libpython.so"))  # type: ignore[arg-type]
    assert (env["GLIBC_TUNABLES"], "INFLIGHT_SERVER_MALLOC" in env) == (own or launcher._MALLOC, own is None)


def test_headers_that_models_need_are_passed_on(tmp_path: Path) -> None:
    for name, keys in {
        "a": {"tenant_header": "x-b"},
        "b": {"tenant_header": "X-A"},
        "c": {},
        "d": {"tenant_header": 3},
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.json").write_text(json.dumps({"model": "m", **keys}))
    (tmp_path / "a" / "2").mkdir()
    (tmp_path / "a" / "2" / "model.json").write_text("[")
    assert forward_arguments([tmp_path, tmp_path / "none"]) == [
        r"--http-header-forward-pattern=(?i)^(X\-A|x\-b)$",
        r"--grpc-header-forward-pattern=(?i)^(X\-A|x\-b)$",
    ]
    assert forward_arguments([tmp_path / "c"]) == []
