"""One server with both models: the same checkpoint, dtype and threads behind two ways of batching."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight_tools.launcher import TritonServer
from inflight_tools.repository import resolve_model, write_entry
from loadtest.errors import LoadTestError

__all__ = ["BASELINE", "DEFAULT_CHECKPOINT", "INFLIGHT", "Endpoints", "checkpoint_folder", "write_repository"]

INFLIGHT, BASELINE = "inflight", "baseline"
DEFAULT_CHECKPOINT = "llama-60m-rand"

_ROOT = Path(__file__).resolve().parents[1]
_MADE = ("llama-60m-rand", "qwen3-0.6b-rand")


@dataclass(frozen=True)
class Endpoints:
    """Addresses, each `host:port`; `pid` is the server's process where it is ours."""

    grpc: str
    http: str
    metrics: str
    pid: int | None = None

    @classmethod
    def of(cls, server: TritonServer) -> Endpoints:
        """Those of a server that runs."""
        assert server.process is not None
        return cls(server.grpc_address, server.http_address, server.metrics_address, server.process.pid)


def checkpoint_folder(model: str) -> Path:
    """The checkpoint that `model` names: "demo", one that `bench/make_checkpoints.py` makes, or a folder.

    A made one is kept under `$INFLIGHT_BENCH_CACHE`, by default `~/.cache/inflight-bench`.

    Raises:
        LoadTestError: no such folder, or it holds no checkpoint.
    """
    if model == "demo":
        return _ROOT / "model_repository" / "demo" / "1" / "checkpoint"
    if model in _MADE:
        cache = Path(os.environ.get("INFLIGHT_BENCH_CACHE", Path.home() / ".cache" / "inflight-bench"))
        if not (cache / model).exists():
            cache.mkdir(parents=True, exist_ok=True)
            print(f"making {model} in {cache} (once)", flush=True)
            subprocess.run([sys.executable, _ROOT / "bench" / "make_checkpoints.py", cache, model], check=True)
        return cache / model
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        raise LoadTestError(
            f"checkpoint {model!r}: no folder with a config.json; give one, or demo, {', '.join(_MADE)}"
        )
    return path.resolve()


def model_context(folder: Path, options: dict[str, Any]) -> int:
    """Tokens that one request may have, prompt and output together."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(options.get("max_model_len") or config.get("max_position_embeddings") or 2048)


def write_repository(repository: Path, folder: Path, options: dict[str, Any]) -> None:
    """Entries `inflight` and `baseline` for the checkpoint in `folder`.

    Args:
        options: further keys of Inflight's `model.json`; the baseline takes its from there.

    Raises:
        LoadTestError: an option that Inflight does not know or that has a wrong value.
    """
    try:
        config = EngineConfig.from_dict({"model": resolve_model(str(folder)), **options}, source="--set")
        write_entry(repository, INFLIGHT, config)
    except (ConfigError, msgspec.ValidationError) as error:
        raise LoadTestError(str(error)) from None
    entry = repository / BASELINE
    shutil.copytree(_ROOT / "model_repository" / BASELINE, entry, ignore=shutil.ignore_patterns("__pycache__"))
    (entry / "1" / "model.json").write_text(json.dumps({"like": f"../../{INFLIGHT}/1/model.json"}), encoding="utf-8")
