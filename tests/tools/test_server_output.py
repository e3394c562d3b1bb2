"""The part of a server's log that a terminal shows."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from inflight_tools.server_output import ServerOutput

BAR = "\rmodel.safetensors:  {percent}%|█▏        | {done}/988M [00:03<00:27, 31.2MB/s]"
START = """\
W1124 10:45:52.487957 16812 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E1124 10:45:52.488094 16812 server.cc:241] "CudaDriverHelper has not been initialized."
I1124 10:46:38.277216 19950 model_lifecycle.cc:472] "loading: demo:1"
inflight: loading demo: importing torch and transformers
"""
LOADED = """\
inflight: loading demo: reading the weights
inflight: warning: [demo] runs through transformers
inflight: loading demo: checking the logits
inflight: loading demo: checking the logits
I1124 10:46:58.757667 19950 model_lifecycle.cc:839] "successfully loaded 'demo'"
+-------+---------+--------+
| Model | Version | Status |
+-------+---------+--------+
Error: Failed to initialize NVML
"""
RUNNING = """\
I1124 10:46:59.109056 19950 http_server.cc:362] "Started Metrics Service at 127.0.0.1:46619"
E1124 10:47:00.109056 19950 triton.py:201] "[inflight] the engine died (SIGKILL): starting it again"
inflight: loading demo: importing torch and transformers
Traceback (most recent call last):
"""


class Followed:
    """A log that grows, and what is shown of it."""

    def __init__(self, folder: Path, terminal: bool = False, verbose: bool = False) -> None:
        self.log = folder / "log"
        self.log.touch()
        self._shown = io.StringIO()
        console = Console(file=self._shown, force_terminal=terminal, color_system=None, width=60)
        self.output = ServerOutput(verbose, console)
        self.output.follow(self.log)

    def grow(self, text: str) -> None:
        with open(self.log, "a", encoding="utf-8", newline="") as log:
            log.write(text)
        self.output.look()

    @property
    def shown(self) -> str:
        return self._shown.getvalue()


def test_phases_are_lines_without_a_terminal(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.grow(START)
    for percent in range(101):
        followed.grow(BAR.format(percent=percent, done=f"{percent * 9.88:.0f}M"))
    followed.grow("\n" + LOADED[:30])  # in the middle of a line
    assert followed.shown.splitlines() == [
        "demo: starting its process",
        "demo: importing torch and transformers",
        *(
            f"downloading model.safetensors: {percent * 9.88:.0f}M of 988M ({percent}%)"
            for percent in range(0, 101, 10)
        ),
    ]
    followed.grow(LOADED[30:])
    followed.output.ready()
    assert followed.shown.splitlines()[-4:] == [
        "demo: reading the weights",
        "inflight: warning: [demo] runs through transformers",
        "demo: checking the logits",
        "demo: loaded",
    ]


def test_a_terminal_shows_one_line_that_goes_away(tmp_path: Path) -> None:
    followed = Followed(tmp_path, terminal=True)
    followed.grow(START + LOADED.replace("reading the", "reading [/] the"))
    followed.output._progress.refresh()  # type: ignore[union-attr]
    _, found, rest = followed.shown.rpartition("demo: loaded")  # the latest: a thread shows it ten times a second
    assert found and "\x1b[2K" not in rest
    followed.output.ready()
    assert "\x1b[2K" in followed.shown.split("demo: loaded")[-1]  # the line is erased
    assert "inflight: warning: [demo] runs through transformers\n" in followed.shown


def test_a_server_that_is_ready_shows_warnings_and_errors(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.grow(START + LOADED)
    followed.output.ready()
    before = followed.shown
    followed.grow(RUNNING)
    everything = followed.log.read_bytes() + b"W1124 the last\n"
    followed.log.unlink()
    followed.output.look()
    for _ in range(2):
        followed.output.finish(everything)
    assert followed.shown.removeprefix(before).splitlines() == [
        'E1124 10:47:00.109056 19950 triton.py:201] "[inflight] the engine died (SIGKILL): starting it again"',
        "Traceback (most recent call last):",
        "W1124 the last",
    ]


def test_verbose_is_the_log_itself(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    followed = Followed(tmp_path, verbose=True)
    followed.grow(START)
    followed.output.ready()
    followed.grow(RUNNING)
    followed.output.finish(followed.log.read_bytes())
    followed.output.keep(followed.log.read_bytes())
    assert (capfdbinary.readouterr().err.decode(), followed.shown) == (START + RUNNING, "")


def test_the_log_of_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = ServerOutput()
    output.keep(b"")
    assert capsys.readouterr().err == ""
    output.keep(START.encode())
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == START and kept.stat().st_mode & 0o77 == 0
    assert capsys.readouterr().err == f"inflight: the server's log is in {kept}\n"


DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download("acme/other", "model.safetensors", endpoint=sys.argv[1], cache_dir=sys.argv[2])
"""
SIZE = 30_000_000


class FakeHub(BaseHTTPRequestHandler):
    """Has one file, and answers each request with it."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in {"X-Repo-Commit": "a" * 40, "ETag": '"e"', "Content-Length": str(SIZE)}.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(bytes(SIZE))

    def log_message(self, *args: object) -> None:
        pass


def test_the_hubs_library_shows_a_download_in_that_form(tmp_path: Path) -> None:
    """With the environment that the launcher gives to the server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "TQDM_POSITION": "-1", "TQDM_MININTERVAL": "1", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", DOWNLOAD, url, str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    followed = Followed(tmp_path)
    followed.grow(done.stderr.replace("\r\n", "\n") + "\n")
    assert followed.shown.splitlines()[-1] == "downloading model.safetensors: 30.0M of 30.0M (100%)", done.stderr
