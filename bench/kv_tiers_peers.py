"""Another engine for `bench/kv_tiers.py`: llama.cpp, whose server saves the KV of a slot in a file and restores it.

`bench/peers/write_gguf.py` writes the checkpoint in 16 bits, once.  llama.cpp keeps KV in 16 bits, as Inflight does.
Its client names the file of a conversation and asks for it (`POST /slots/0?action=restore`), so that is a part of the
time to the first token.  `believes_a_changed_byte` says whether it restores a file with a changed byte.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import common

SIDES = ("llama.cpp computed", "llama.cpp warm", "llama.cpp cold")
_FILE = "conversation.bin"
_OUTPUT = 8
_START_SECONDS = 120.0


def names(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The sides for which `arguments` names an installation."""
    return SIDES if arguments["llama_cpp"] else ()


def gguf(arguments: dict[str, Any]) -> Path:
    """The checkpoint as llama.cpp reads it."""
    folder = Path(common.checkpoint(arguments["model"]))
    file = common.CACHE / "gguf" / f"{folder.name}-F16.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, common.HERE / "peers" / "write_gguf.py", folder, file], check=True)
    return file


def store(conversation: list[int], arguments: dict[str, Any]) -> common.Run:
    """Leave the conversation's file in the folder, and try to restore one with a changed byte."""
    with _Server(arguments) as server:
        server.first_token(conversation)
        server.slot("save")
    file = Path(arguments["folder"]) / _FILE
    content = bytearray(file.read_bytes())
    at = len(content) * 2 // 3
    content[at] ^= 64
    file.with_name("changed.bin").write_bytes(content)
    with _Server(arguments) as server:
        believed = server.slot("restore", "changed.bin")
    return {"bytes": len(content), "believes_a_changed_byte": believed}


def run(side: str, prompt: list[int], arguments: dict[str, Any], drop_pages: Any) -> common.Run:
    """Seconds to the first token of the prompt in a new process, and CPU seconds until then."""
    with _Server(arguments) as server:
        if side.endswith("cold"):
            drop_pages(Path(arguments["folder"]))
        start, cpu = time.perf_counter(), server.cpu_seconds()
        if not side.endswith("computed"):
            assert server.slot("restore"), "the slot's file is refused"
        begun = time.perf_counter()
        found, num_cached = server.first_token(prompt)
        assert bool(num_cached) != side.endswith("computed"), num_cached
        return {
            "seconds": found - start,
            "restore_seconds": begun - start,
            "cpu_seconds": server.cpu_seconds() - cpu,
            "hits": num_cached,
        }


def version(arguments: dict[str, Any]) -> str:
    tool = Path(arguments["llama_cpp"]) / "llama-server"
    printed = subprocess.run([tool, "--version"], capture_output=True, text=True).stderr
    return next((line for line in printed.splitlines() if line.startswith("version")), "unknown")


class _Server:
    """A new llama-server with one slot, ready."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        threads = str(arguments["threads"])
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._command: list[Any] = [
            Path(arguments["llama_cpp"]) / "llama-server",
            *("-m", gguf(arguments), "--host", "127.0.0.1", "--port", str(port)),
            *("-c", str(arguments["prompt"] + 192), "-np", "1", "-b", "2048", "-ub", "512", "-cram", "0"),
            *("-t", threads, "-tb", threads, "--slot-save-path", arguments["folder"]),
        ]

    def __enter__(self) -> _Server:
        self._process = subprocess.Popen(
            self._command, env=common.peer_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"llama-server does not start: {' '.join(map(str, self._command))}")
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def slot(self, action: str, file: str = _FILE) -> bool:
        """Whether its file was saved or restored."""
        try:
            with self._post(f"/slots/0?action={action}", {"filename": file}) as response:
                return json.load(response)[f"n_{action}d"] > 0
        except urllib.error.HTTPError:
            return False

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """When it came, and how many tokens of the prompt had their KV already."""
        body = {"prompt": prompt, "n_predict": _OUTPUT, "cache_prompt": True, "temperature": 0, "ignore_eos": True}
        with self._post("/completion", {**body, "stream": True, "id_slot": 0}) as response:
            lines = (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))
            next(lines)
            came = time.perf_counter()
            *_, last = lines
        return came, len(prompt) - last["timings"]["prompt_n"]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=600)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False
