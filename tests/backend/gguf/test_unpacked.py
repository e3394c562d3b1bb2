"""The folder of a GGUF file's configuration and tokenizer: made once, whole, and anew when the file changes."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from gguf_files import as_gguf

from inflight.config import EngineConfig
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.lifecycle.checkpoint_id import checkpoint_id
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.gguf import unpacked as module
from inflight.gguf.header import GgufError
from inflight.gguf.unpacked import unpacked
from inflight.hub import CheckpointFileError, checkpoint_file, snapshot
from inflight.loading.checkpoint.checkpoint_config import read_config
from inflight.loading.load_errors import LoadError

METADATA: dict[str, Any] = {
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "tokenizer.chat_template.tool_use": "tools",
    "tokenizer.ggml.bos_token_id": 5,
    "tokenizer.ggml.eos_token_id": 6,
    "general.sampling.temp": 0.7,
    "general.sampling.top_k": 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inflight" / "gguf"


@pytest.fixture
def file(tmp_path: Path, folder: str, cache: Path) -> Path:
    as_gguf(folder, tmp_path / "model.gguf", metadata=METADATA)
    return tmp_path / "model.gguf"


def test_it_is_a_checkpoint_without_weights(file: Path, cache: Path) -> None:
    made = snapshot(str(file))
    assert made is not None and made.parent == cache
    config = read_config(EngineConfig(model=str(file)))
    assert (config.model_type, config.eos_token_id, config.bos_token_id) == ("llama", [6], 5)
    assert Tokenizer.load(str(file)).encode('"!"') == [1, 198]
    template = ChatTemplate.load(str(file))
    try:
        assert template.render(json.dumps({"messages": [{"role": "user", "content": "hi"}]})) == "&hi"
    finally:
        template.close()
    assert generation_defaults(EngineConfig(model=str(file))) == {"temperature": 0.7, "top_k": 20}
    assert checkpoint_file(str(file), "additional_chat_templates/tool_use.jinja") is not None
    assert checkpoint_file(str(file), "model.safetensors") is None


def test_it_is_made_once_and_by_this_user_alone(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = unpacked(file)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and stat.S_IMODE(first.stat().st_mode) == 0o700
    monkeypatch.setattr(module, "read_header", None)
    assert unpacked(file) == first and list(cache.iterdir()) == [first]


def test_it_is_made_anew_when_the_file_changes_or_what_makes_it(
    file: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = unpacked(file)
    as_gguf(folder, file, metadata=METADATA | {"tokenizer.ggml.eos_token_id": 9})
    second = unpacked(file)
    assert first != second and json.loads((second / "config.json").read_text())["eos_token_id"] == [9]
    monkeypatch.setattr(module, "_code", lambda: "another version")
    assert unpacked(file) not in (first, second)


def test_a_file_overwritten_in_place_is_another_one_even_with_the_times_of_the_first(file: Path, folder: str) -> None:
    first, before = unpacked(file), file.stat()
    as_gguf(folder, file, metadata=METADATA | {"tokenizer.ggml.eos_token_id": 9})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert [after.st_ino, after.st_size, after.st_mtime_ns] == [before.st_ino, before.st_size, before.st_mtime_ns]
    assert unpacked(file) != first


def test_a_part_that_a_killed_process_left_is_replaced(file: Path) -> None:
    made = unpacked(file)
    (made / "config.json").unlink()
    (made / "tokenizer.json").write_text("half of i")
    assert unpacked(file) == made
    assert json.loads((made / "tokenizer.json").read_text()) and (made / "config.json").exists()


def test_another_process_that_makes_it_at_the_same_time(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = unpacked(file)
    aside = made.rename(made.with_name("aside"))
    contents = module._contents

    def slow(header: Any) -> dict[str, str]:
        shutil.copytree(aside, made)  # meanwhile
        return contents(header)

    monkeypatch.setattr(module, "_contents", slow)
    shutil.copy(file, aside / "theirs")
    assert unpacked(file) == made and (made / "theirs").exists(), "it may be read already"
    shutil.rmtree(aside)
    assert list(cache.iterdir()) == [made]


def test_a_file_that_is_still_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = module._contents
    monkeypatch.setattr(module, "_contents", lambda header: (os.utime(file, (1, 1)), contents(header))[1])
    with pytest.raises(GgufError, match="it was written to while it was read; try again when it is complete"):
        unpacked(file)


def test_only_the_folders_used_last_are_kept(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_FOLDERS", 3)
    first = unpacked(file)
    for age in range(1, 6):
        (cache / f"old{age}").mkdir()
        os.utime(cache / f"old{age}", (age, age))
    monkeypatch.setattr(module, "_code", lambda: "another version")
    second = unpacked(file)
    assert set(cache.iterdir()) == {first, second, cache / "old5"}


def expands_nothing(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_cannot_be_used(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of users without a home, and one that another user can write."""
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    fallback = tmp_path / "tmp" / f"inflight-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert unpacked(file).parent == fallback
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", expands_nothing)
    assert unpacked(file).parent == fallback
    open_to_all = tmp_path / "shared" / "inflight" / "gguf"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert unpacked(file).parent == fallback
    fallback.chmod(0o777)
    with pytest.raises(
        CheckpointFileError, match=r"cannot be unpacked: .* does not belong to this user alone; set XDG_C"
    ):
        snapshot(str(file))


def test_without_a_tokenizer_that_is_served(tmp_path: Path, folder: str, cache: Path) -> None:
    """The model loads with that of another folder; else the message names the way out."""
    file = tmp_path / "model.gguf"
    as_gguf(folder, file, metadata={"tokenizer.ggml.pre": "deepseek-v9"})
    assert read_config(EngineConfig(model=str(file))).vocab_size == 199
    with pytest.raises(
        CheckpointFileError, match=r'model.gguf: its text is cut as .*deepseek-v9.*; set "tokenizer" in'
    ):
        Tokenizer.load(str(file), required=False)


def test_messages_name_the_file(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(LoadError, match=r"notes.txt: it is no GGUF file: it does not begin with GGUF"):
        read_config(EngineConfig(model=str(file)))
    assert not list(cache.glob("*"))


def test_the_id_is_that_of_the_content(file: Path, folder: str, tmp_path: Path) -> None:
    first = checkpoint_id(str(file))
    assert first is not None and len(first) == 16
    (tmp_path / "elsewhere").mkdir()
    assert checkpoint_id(str(shutil.copy(file, tmp_path / "elsewhere" / file.name))) == first
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoint_id(str(file)) != first
