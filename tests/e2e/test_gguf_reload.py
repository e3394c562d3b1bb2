"""A GGUF file in a model repository that is replaced: a reload serves the new one, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from gguf_files import as_gguf
from model_entries import CHECKPOINT, killed_at_the_end, load, write_entry
from processes_of import engine_process, engine_processes
from tritonclient.utils import InferenceServerException
from wire import post, wait_for

from inflight_tools.launcher import TritonServer

pytestmark = pytest.mark.nightly  # loads in full
_NAME = "file"
_BODY = {"input_ids": [5, 6, 7, 8], "parameters": {"temperature": 0, "max_tokens": 8, "return_token_ids": True}}


def made(folder: Path, seed: int) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 16, "vocab_size": 4096, "eos_token_id": 2}
    file = folder / f"{seed}.gguf"
    as_gguf(make_checkpoint("llama", folder / str(seed), seed, **sizes), file, "Q4_0")
    return file


def damaged(file: Path) -> Path:
    """Cut in the middle of a tensor, as a download that broke off."""
    cut = file.with_suffix(".cut")
    cut.write_bytes(file.read_bytes()[:-4096])
    return cut


def replace(served: Path, file: Path) -> None:
    shutil.copy(file, served.with_suffix(".new"))
    os.replace(served.with_suffix(".new"), served)


def answer(server: TritonServer) -> tuple[int, Any]:
    status, text = post(f"http://{server.http_address}/v2/models/{_NAME}/generate", _BODY)
    return status, json.loads(text)["token_ids"] if status == 200 else text


def entry(repository: Path, file: Path) -> Path:
    """Returns the file that is served."""
    folder = write_entry(repository, _NAME, model="model.gguf", tokenizer=str(CHECKPOINT), max_replays=0)
    served = folder / "1" / "model.gguf"
    shutil.copy(file, served)
    return served


def test_reloads(triton_installed: None, keeping: dict[str, str], tmp_path: Path) -> None:
    first, second = made(tmp_path, 1), made(tmp_path, 2)
    served = entry(tmp_path / "models", first)
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_models": [_NAME], "env": keeping}
    with killed_at_the_end(TritonServer(tmp_path / "models", **options)) as server:
        status, old = answer(server)
        assert status == 200, old
        replace(served, second)
        load(server, _NAME)
        status, new = answer(server)
        assert status == 200 and new != old
        replace(served, damaged(first))
        with pytest.raises(InferenceServerException, match=r"blk\.|output|token_embd|truncated|download"):
            load(server, _NAME)
        assert answer(server) == (200, new), "the instance before it goes on"
        replace(served, first)
        load(server, _NAME)
        assert answer(server) == (200, old)
        wait_for(lambda: len(engine_processes(server, _NAME)) == 1)  # those of the instances before it have left
        engine_process(server, _NAME).kill()
        wait_for(lambda: answer(server) == (200, old))


def test_polling(triton_installed: None, keeping: dict[str, str], tmp_path: Path) -> None:
    first, second = made(tmp_path, 1), made(tmp_path, 2)
    served, log = entry(tmp_path / "models", first), tmp_path / "log"
    options: dict[str, Any] = {
        "model_control_mode": "poll",
        "extra_args": ["--repository-poll-secs=1"],
        "log_file": log,
        "env": keeping,
    }
    with killed_at_the_end(TritonServer(tmp_path / "models", **options)) as server:
        _, old = answer(server)
        replace(served, second)
        wait_for(lambda: answer(server)[1] != old, 90)
        status, new = answer(server)
        assert status == 200
        replace(served, damaged(first))
        wait_for(lambda: "download it again" in log.read_text(errors="replace"), 90)
        assert answer(server) == (200, new)
        replace(served, first)
        wait_for(lambda: answer(server) == (200, old), 90)
