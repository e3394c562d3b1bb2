"""Forks of a spare process have the vocabulary that it has read, and no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf_files
import pytest
from checkpoints import VOCAB, make_checkpoint
from startup_rig import OF_BLOCKS, config, start

from inflight.kernels.cpu import library
from inflight.loading import grammars

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture
DEMO = Path(__file__).parents[4] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"


def test_forks_have_the_vocabulary_that_their_parent_has_read(tmp_path: Path, cache: Path) -> None:
    """In no thread, once one of them was asked for a grammar, and not that of a tokenizer that has changed since."""
    path = Path(make_checkpoint("llama", tmp_path / "checkpoint", vocab_size=32000, eos_token_id=2))
    shutil.copy(DEMO, path / "tokenizer.json")
    start(str(path))
    program = f"""
import os, time
from pathlib import Path
from inflight.config import EngineConfig
from inflight.grammars import guidance
from inflight.grammars.spec import GrammarSpec
from inflight.loading import startup
config = EngineConfig.from_dict({{"model": {str(path)!r}, "device": "cpu", "kv_cache_memory": "1MiB"}})
assert startup.heat(config)
assert not startup._later == []
def compiles():
    grammars, spec = startup.load_or_reuse(config).info.grammars, GrammarSpec("regex", "[0-9]+")
    while (outcome := grammars.outcome(spec)) is None:
        time.sleep(0.01)
    return outcome
def forked(work):
    if not os.fork():
        print(repr(work()), flush=True)
        os._exit(0)
    os.wait()
forked(lambda: startup.load_or_reuse(config).info.grammars.warm_up())
startup.heat_further()
print(len(startup._later), flush=True)
forked(compiles)
startup.heat_further()
print(len(os.listdir("/proc/self/task")), startup._later, flush=True)
real, guidance.read_vocabulary = guidance.read_vocabulary, None
for _ in range(2):
    forked(compiles)
file = Path({str(path)!r}, "tokenizer.json")
file.write_bytes(file.read_bytes() + b" ")
print("NoneType" in compiles())
guidance.read_vocabulary = real
print(repr(compiles()))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines() == ["None", "1", "''", "1 []", "''", "''", "True", "''"], done.stderr


def test_forks_of_a_gguf_file_that_was_replaced_read_its_own_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the first one was unpacked to is there still."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grammars, "_shared", {})
    plain = make_checkpoint("llama", tmp_path / "plain", **OF_BLOCKS, eos_token_id=2)
    file, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for each in (file, other):
        gguf_files.as_gguf(plain, each)
    facts = config(str(file)), VOCAB, [2]
    grammars.share_grammars(*facts)
    shared = grammars.checkpoint_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is shared
    os.replace(other, file)
    assert grammars.checkpoint_grammars(*facts) is not shared
    grammars.share_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is grammars.checkpoint_grammars(*facts) is not shared


def test_forks_of_another_snapshot_read_its_own_vocabulary_and_the_hub_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local: list[Path | None] = [None]
    monkeypatch.setattr(grammars, "_shared", {})
    monkeypatch.setattr(grammars, "snapshot", lambda source, revision: local[0])
    monkeypatch.setattr(grammars, "checkpoint_file", None)
    facts = config("some/repository"), VOCAB, [2]
    grammars.share_grammars(*facts)
    assert not grammars._shared
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    shutil.copy(DEMO, tmp_path / "old")
    local[0] = tmp_path / "old"
    grammars.share_grammars(*facts)
    shared = grammars.checkpoint_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is shared
    local[0] = tmp_path / "new"  # whose tokenizer is not here yet
    assert grammars.checkpoint_grammars(*facts) is not shared
    shutil.copy(DEMO, tmp_path / "new")
    assert grammars.checkpoint_grammars(*facts) is not shared
