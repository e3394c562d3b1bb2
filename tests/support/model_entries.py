"""Model entries, and models that a test module loads into a tritonserver that it shares with other modules."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from processes_of import stubs
from tritonclient.utils import InferenceServerException

from inflight_tools.launcher import TritonServer

MODELS = Path(__file__).parents[2] / "model_repository"
CHECKPOINT = MODELS / "demo" / "1" / "checkpoint"
CONFIG = 'backend: "inflight"\n'

# The demo checkpoint on few resources.
SMALL = {
    "model": str(CHECKPOINT),
    "dtype": "float32",
    "device": "cpu",
    "cpu_threads": 1,
    "kv_cache_memory": "64MiB",
}
_UNLOAD_SECONDS = 60.0


def write_entry(repository: Path, name: str, config: str = CONFIG, **options: Any) -> Path:
    """An entry with the options of `SMALL` and these; returns its folder."""
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.json").write_text(json.dumps({**SMALL, **options}))
    (version.parent / "config.pbtxt").write_text(config)
    return version.parent


def copy_entry(repository: Path, name: str, **changes: Any) -> Path:
    """An entry of `model_repository` with its checkpoint on one core, and other options changed."""
    options = json.loads((MODELS / name / "1" / "model.json").read_text())
    options |= {"model": str(CHECKPOINT), "cpu_threads": 1, **changes}
    entry = write_entry(repository, name, (MODELS / name / "config.pbtxt").read_text())
    (entry / "1" / "model.json").write_text(json.dumps(options))
    return entry


def keep_weights(cache: str, **options: Any) -> None:
    """Pack a checkpoint's weights here, with the options of `SMALL` and these: engines that find them start sooner.

    They import no transformers, which takes a core for seconds; this process has it in any case.
    """
    from inflight.config import EngineConfig
    from inflight.loading.startup import load_or_reuse, wait_until_kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE", cache)
        load_or_reuse(EngineConfig.from_dict({**SMALL, **options}))
        wait_until_kept()


@contextmanager
def killed_at_the_end(server: TritonServer) -> Iterator[TritonServer]:
    """The server, ready; for tests that are not about its stop, which takes seconds."""
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.kill()


@contextmanager
def loaded(server: TritonServer, *names: str, **entries: Mapping[str, Any]) -> Iterator[TritonServer]:
    """Models that are loaded within the context; their unloading, mostly pauses of Triton, is not waited for.

    Args:
        server: in explicit mode; the last of its repositories is the tests' own.
        names: models whose entries exist.
        entries: models to write entries of: their options (`write_entry`).
    """
    for name, options in entries.items():
        write_entry(server.repositories[-1], name, **options)
    models = [*names, *entries]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: load(server, name), models))
    try:
        yield server
    finally:
        for name in models:
            threading.Thread(target=_unload_unwatched, args=(server, name), daemon=True).start()


def load(server: TritonServer, name: str, **options: Any) -> None:
    with grpcclient.InferenceServerClient(server.grpc_address) as control:
        control.load_model(name, headers=server.admin_metadata, **options)


def _unload_unwatched(server: TritonServer, name: str) -> None:
    with contextlib.suppress(InferenceServerException):  # the server may be at its end
        unload(server, name)


def unload(server: TritonServer, name: str) -> None:
    """Returns when the model's stubs are gone; Triton keeps a model while a gRPC stream that used it is open."""
    with grpcclient.InferenceServerClient(server.grpc_address) as control:
        control.unload_model(name, headers=server.admin_metadata)
    wait_unloaded(server, name)


def wait_unloaded(server: TritonServer, name: str) -> None:
    deadline = time.monotonic() + _UNLOAD_SECONDS
    while stubs(server, name):
        assert time.monotonic() < deadline, f"model {name!r} is still there {_UNLOAD_SECONDS:.0f} s after its unload"
        time.sleep(0.02)
