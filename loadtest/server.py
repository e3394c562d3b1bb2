"""One server with both models: the same checkpoint, dtype and threads, batched in two ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight_client.endpoint import find_endpoint
from inflight_client.errors import ServerUnreachableError
from inflight_tools.launcher import TritonServer
from inflight_tools.repository import resolve_model, write_entry
from loadtest.errors import LoadTestError

__all__ = ["BASELINE", "DEFAULT_CHECKPOINT", "INFLIGHT", "Endpoints", "checkpoint_folder", "write_repository"]

INFLIGHT, BASELINE = "inflight", "baseline"
DEFAULT_CHECKPOINT = "llama-60m-rand"

_ROOT = Path(__file__).resolve().parents[1]
_GENERATED = ("llama-60m-rand", "qwen3-0.6b-rand")


@dataclass(frozen=True)
class Endpoints:
    """Addresses, each `host:port`; `pid` is the server's process if we started it."""

    grpc: str
    http: str
    metrics: str
    pid: int | None = None

    @classmethod
    def of(cls, server: TritonServer) -> Endpoints:
        """The addresses of a server that we started."""
        assert server.process is not None
        return cls(server.grpc_address, server.http_address, server.metrics_address, server.process.pid)

    @classmethod
    def at(cls, url: str) -> tuple[Endpoints, str]:
        """The addresses of a running server with Triton's consecutive ports (HTTP, gRPC, metrics).

        Args:
            url: its HTTP or gRPC address, with or without a scheme.

        Returns:
            The addresses, and the protocol that answers at `url`.

        Raises:
            LoadTestError: `url` is not an address, or nothing answers there.
        """
        try:
            protocol, found = find_endpoint(url)
            parts = urlsplit(found)
            if parts.port is None or parts.hostname is None:
                raise ValueError(f"url={url!r}: expected host:port, such as 127.0.0.1:8000")
        except ServerUnreachableError as error:
            raise LoadTestError(f"{error.message}; start a server there or correct --url") from None
        except ValueError as error:
            raise LoadTestError(str(error)) from None
        host, http = parts.netloc.rpartition(":")[0], parts.port - (protocol == "grpc")
        return cls(f"{host}:{http + 1}", f"{host}:{http}", f"{host}:{http + 2}"), protocol


def checkpoint_folder(model: str) -> Path:
    """The checkpoint that `model` names: "demo", one that `bench/make_checkpoints.py` generates, or a folder.

    Generated checkpoints are kept under `$INFLIGHT_BENCH_CACHE`, by default `~/.cache/inflight-bench`.

    Raises:
        LoadTestError: no such folder, or no checkpoint in it.
    """
    if model == "demo":
        return _ROOT / "model_repository" / "demo" / "1" / "checkpoint"
    if model in _GENERATED:
        cache = Path(os.environ.get("INFLIGHT_BENCH_CACHE", Path.home() / ".cache" / "inflight-bench"))
        if not (cache / model).exists():
            cache.mkdir(parents=True, exist_ok=True)
            print(f"generating {model} in {cache} (once)", flush=True)
            subprocess.run([sys.executable, _ROOT / "bench" / "make_checkpoints.py", cache, model], check=True)
        return cache / model
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        raise LoadTestError(
            f"checkpoint {model!r}: not a folder with a config.json; give one, or demo, {', '.join(_GENERATED)}"
        )
    return path.resolve()


def model_context(folder: Path, options: dict[str, Any]) -> int:
    """Maximum length of a request in tokens, prompt and output together."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(options.get("max_model_len") or config.get("max_position_embeddings") or 2048)


def write_repository(repository: Path, folder: Path, options: dict[str, Any]) -> None:
    """Write the entries `inflight` and `baseline` for the checkpoint in `folder`.

    Args:
        options: further keys of Inflight's `model.json`, which the baseline also reads.

    Raises:
        LoadTestError: an unknown option, or one with a wrong value.
    """
    try:
        config = EngineConfig.from_dict({"model": resolve_model(str(folder)), **options}, source="--set")
        write_entry(repository, INFLIGHT, config)
    except (ConfigError, msgspec.ValidationError) as error:
        raise LoadTestError(str(error)) from None
    entry = repository / BASELINE
    shutil.copytree(_ROOT / "model_repository" / BASELINE, entry, ignore=shutil.ignore_patterns("__pycache__"))
    (entry / "1" / "model.json").write_text(json.dumps({"like": f"../../{INFLIGHT}/1/model.json"}), encoding="utf-8")
