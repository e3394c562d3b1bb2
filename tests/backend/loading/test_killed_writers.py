"""Writers of kept weights that are killed, and many that start at once: files are whole, and written once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from inflight.kernels.cpu import library
from inflight.loading.saved import cache_folder, weights_file
from inflight.loading.saved.cache_folder import CacheFolder
from inflight.loading.saved.mapped_file import MappedFile
from inflight.loading.saved.weights_file import tensors_of

pytestmark = pytest.mark.nightly

NAME, KEY = "a.iw", "a"
TENSORS = [torch.arange(700_000), torch.ones(300, 17, dtype=torch.bfloat16), torch.arange(50_000, dtype=torch.int32)]
PIECE = 70_000  # bytes of a write: some hundred moments


def write(folder: CacheFolder) -> bool:
    size = weights_file.size_of(TENSORS)
    return folder.write(NAME, size, lambda descriptor: weights_file.write(descriptor, KEY, {}, TENSORS))


def killed_at(folder: CacheFolder, moment: int) -> bool:
    """Whether a process that writes was killed before its call number `moment`, counted over all calls that write."""
    pid = os.fork()
    if pid:
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return call(*arguments, **options)

        return counts

    try:
        pwrite = os.pwrite
        weights_file.os.pwrite = counted(lambda fd, data, at: pwrite(fd, data[:PIECE], at))
        cache_folder.os.open = counted(os.open)
        cache_folder.os.ftruncate = counted(os.ftruncate)
        cache_folder.os.fsync = counted(os.fsync)
        cache_folder.Path.rename = counted(Path.rename)
        write(folder)
    finally:
        os._exit(0)


def is_whole(folder: CacheFolder) -> bool:
    """Whether the file is there; then it is what was written."""
    descriptor = folder.open(NAME)
    if descriptor is None:
        return False
    try:
        assert all(map(torch.equal, tensors_of(MappedFile(descriptor, KEY)), TENSORS))
    finally:
        os.close(descriptor)
    return True


def test_a_writer_is_killed_at_every_call(tmp_path: Path) -> None:
    """No file appears before it is whole; the next writer is not held up, and clears away the rest."""
    moment = 0
    while True:
        folder = CacheFolder(tmp_path / str(moment), 2**30)
        was_killed = killed_at(folder, moment)
        if not was_killed:
            break
        whole = is_whole(folder)
        assert write(folder) or whole
        assert is_whole(folder)
        assert [path.name for path in folder.path.iterdir()] == [NAME]
        moment += 1
    assert moment > 80


def test_a_file_that_is_replaced_while_its_writer_is_killed_stays_whole(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 2**30)
    assert write(folder)
    moments = 0
    while killed_at(folder, moments):
        assert is_whole(folder)
        moments += 1
    assert moments > 80
    assert is_whole(folder)


STARTS = """
import json, os, sys
from inflight.config import EngineConfig
from inflight.loading import startup
from inflight.loading.saved.cache_folder import CacheFolder

written, real = [], CacheFolder.write
CacheFolder.write = lambda *arguments: (written.append(real(*arguments)), written[-1])[1]
config = EngineConfig.from_dict({"model": sys.argv[1], "device": "cpu", "kv_cache_memory": "1MiB"})
import inflight.loading.loader
print("imported", flush=True)
sys.stdin.readline()
loaded = startup.load_or_reuse(config)
startup.wait_until_kept()
print(json.dumps([written, loaded.info.vocab_size]))
"""


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
def test_eight_engines_that_start_at_once_write_once(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    env = {**os.environ, "INFLIGHT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", STARTS, path]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) for _ in range(8)
    ]
    for engine in engines:
        assert engine.stdout is not None and engine.stdout.readline() == "imported\n"
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    found = [json.loads(engine.communicate(timeout=300)[0].splitlines()[-1]) for engine in engines]
    assert [engine.returncode for engine in engines] == [0] * 8
    assert len({size for _, size in found}) == 1
    assert sum([len(written) for written, _ in found]) >= 1
    assert sum([sum(written) for written, _ in found]) == 1, found
    assert len(list((tmp_path / "cache" / "weights").glob("*.iw"))) == 1
    assert not list((tmp_path / "cache" / "weights").glob("*.part"))
