"""Files of the hub: a hub that does not answer is reported at once, with the cause and ways out."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from huggingface_hub import constants

from inflight import hub
from inflight.config import EngineConfig
from inflight.hub import CheckpointFileError, checkpoint_file
from inflight.loading.checkpoint.checkpoint_config import read_config
from inflight.loading.load_errors import LoadError
from inflight_tools.ports import pick_ports


class FakeHub(BaseHTTPRequestHandler):
    """Answers each request with a status, and the error code by which the hub's library tells the errors apart."""

    status, code = 200, ""
    asked: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        # The port may have been another test's a moment ago, whose clients still ask it.
        if "/resolve/" in self.path:
            self.asked.append(f"{self.command} {self.path}")
        self.send_response(self.status)
        if self.code:
            self.send_header("X-Error-Code", self.code)
            self.send_header("X-Error-Message", "what the hub says")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._unreachable.cache_clear()
    yield
    hub._unreachable.cache_clear()


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    return endpoint


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    class Handler(FakeHub):
        asked: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        use_hub(monkeypatch, server.server_port)
        yield Handler
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry would wait: it fails the test instead."""

    def sleep(seconds: float) -> None:
        pytest.fail(f"waits {seconds} s before it asks again")

    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=sleep, time=time.time))


def test_a_hub_that_refuses_connections_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = use_hub(monkeypatch, pick_ports(1)[0])
    with pytest.raises(CheckpointFileError) as error:
        checkpoint_file("acme/other", "config.json")
    said = str(error.value)
    assert said.startswith(f"acme/other: cannot get config.json from the hub: {endpoint} cannot be reached (")
    assert "Connection refused" in said and str(tmp_path) in said and "\n" not in said
    for way_out in ("a local folder", "HF_ENDPOINT", "HF_HUB_OFFLINE=1"):
        assert way_out in said
    with pytest.raises(LoadError, match=r"acme/other: cannot get config\.json from the hub: .* cannot be reached"):
        read_config(EngineConfig(model="acme/other"))


def test_a_hub_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_hub(monkeypatch, silent.getsockname()[1])
        with pytest.raises(CheckpointFileError, match=r"cannot be reached \(.*timed out"):
            checkpoint_file("acme/other", "config.json")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_without_a_hub_behind_it(answering: type[FakeHub], status: int) -> None:
    answering.status = status
    for name in ("config.json", "tokenizer.json"):
        with pytest.raises(CheckpointFileError, match=rf"cannot be reached \(HTTP status {status}\)"):
            checkpoint_file("acme/other", name)
    assert answering.asked == ["HEAD /acme/other/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "acme/other: no such directory, and the hub has no such repository, or it is private"),
        (403, "GatedRepo", "only to users who have accepted its licence: .* set HF_TOKEN"),
        (404, "RevisionNotFound", "the hub's repository has no revision 'v9'"),
        (400, "", r"acme/other: cannot get config\.json from the hub: Bad request"),
    ],
)
def test_what_the_hub_refuses(answering: type[FakeHub], status: int, code: str, says: str) -> None:
    answering.status, answering.code = status, code
    with pytest.raises(CheckpointFileError, match=says) as error:
        checkpoint_file("acme/other", "config.json", "v9")
    assert "\n" not in str(error.value)


def test_a_file_that_the_repository_lacks(answering: type[FakeHub]) -> None:
    answering.status, answering.code = 404, "EntryNotFound"
    assert checkpoint_file("acme/other", "chat_template.jinja") is None


def test_offline_mode_says_that_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointFileError, match="HF_HUB_OFFLINE is set, and the cache does not have it: unset it"):
        checkpoint_file("acme/other", "config.json")


def test_a_path_is_no_business_of_the_hub(answering: type[FakeHub]) -> None:
    with pytest.raises(CheckpointFileError, match=r"/no/such/folder: no such directory, and the hub says: Repo id"):
        checkpoint_file("/no/such/folder", "config.json")
    assert answering.asked == []


@pytest.mark.nightly
def test_the_engine_ends_with_that_line() -> None:
    """With what the environment says, as a user sets it."""
    code = 'from inflight import LLM; LLM("acme/other")'
    environment = {
        "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "HOME": "/nowhere",
        "HF_ENDPOINT": f"http://127.0.0.1:{pick_ports(1)[0]}", "HF_HUB_CACHE": "/nowhere",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "cannot be reached" in done.stderr.splitlines()[-1]
    assert "Retrying" not in done.stderr


def test_a_missing_gguf_file_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = pick_ports(1)
    use_hub(monkeypatch, port)  # which does not answer
    with pytest.raises(
        CheckpointFileError, match=r"^tiny\.gguf: no such file; give the path of a GGUF file, or a hub id$"
    ):
        checkpoint_file("tiny.gguf", "config.json")
