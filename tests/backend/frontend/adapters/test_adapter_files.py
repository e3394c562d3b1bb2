"""Copies of adapters: what was accepted stays, and nothing else does."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_folders import write_adapter

from inflight.adapters.spec import AdapterError, describe_adapter
from inflight.engine.adapter import AdapterRef
from inflight.frontend.adapters.adapter_files import AdapterFiles, files_folder


def describe(folder: Path, name: str) -> AdapterRef:
    return describe_adapter(folder, name, 16)


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    return AdapterFiles(tmp_path / "kept", describe)


def copies(files: AdapterFiles) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir() if path.is_dir())


def test_what_was_accepted_stays_whatever_happens_to_the_folder(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "doll")
    kept = files.keep("doll", source)
    weights = source / "adapter_model.safetensors"
    with open(weights, "r+b") as file:  # in place: a hard link would change, too
        file.truncate(10)
    assert describe(Path(kept.ref.path), "doll").id == kept.ref.id
    shutil.rmtree(source)
    assert describe(Path(kept.ref.path), "doll").id == kept.ref.id


def test_only_this_user_can_read_the_copies(files: AdapterFiles, tmp_path: Path) -> None:
    kept = files.keep("doll", write_adapter(tmp_path / "doll"))
    for folder in (files.folder, Path(kept.ref.path)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in Path(kept.ref.path).iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_copy_leaves_with_its_last_reference(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "doll")
    named, of_a_request = files.keep("doll", source), files.keep("puppet", source)
    assert named.ref.path == of_a_request.ref.path and len(copies(files)) == 1
    assert (named.ref.name, of_a_request.ref.name) == ("doll", "puppet")
    del named
    gc.collect()
    assert len(copies(files)) == 1
    del of_a_request
    gc.collect()
    assert copies(files) == []
    again = files.keep("doll", source)
    assert Path(again.ref.path).is_dir()


def test_a_refused_adapter_leaves_nothing(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "doll", rank=32)
    with pytest.raises(AdapterError, match=r"adapter 'doll': .* has rank 32: at most max_lora_rank=16"):
        files.keep("doll", source)
    gc.collect()
    assert copies(files) == []


def test_errors_name_the_operators_folder(files: AdapterFiles, tmp_path: Path) -> None:
    source = tmp_path / "empty"
    for prepare, said in (
        (lambda: None, f"there is no folder {source}"),
        (source.mkdir, f"{source} has no adapter_config.json"),
        ((source / "adapter_model.bin").touch, "is a pickle, which can run code"),
        (lambda: write_adapter(source), None),
        ((source / "adapter_config.json").unlink, f"{source} has no adapter_config.json"),
        (lambda: os.mkfifo(source / "adapter_config.json"), "adapter_config.json is no file"),
    ):
        prepare()  # type: ignore[operator]
        if said is None:
            files.keep("doll", source)
            continue
        with pytest.raises(AdapterError) as caught:
            files.keep("doll", source)
        assert said in str(caught.value) and "\n" not in str(caught.value)
        assert str(files.folder) not in str(caught.value)


def test_files_must_be_in_the_allowed_folders_whatever_links_say(files: AdapterFiles, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside")
    allowed = tmp_path / "allowed"
    write_adapter(allowed / "good")
    (allowed / "linked").symlink_to(outside)
    (allowed / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (allowed / "files" / name).symlink_to(outside / name)
    (allowed / "blobs").mkdir()
    (allowed / "snapshot").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):  # the layout of the hub's cache
        shutil.copy(outside / name, allowed / "blobs" / name)
        (allowed / "snapshot" / name).symlink_to(f"../blobs/{name}")
    for name in ("good", "snapshot"):
        files.keep(name, allowed / name, [allowed])
    for name in ("linked", "files"):
        with pytest.raises(AdapterError, match="leads out of the folders that lora_allowed_paths"):
            files.keep(name, allowed / name, [allowed])
        files.keep(name, allowed / name, [allowed, outside])


def test_the_next_process_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    write_adapter(tmp_path / "doll")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from inflight.adapters.spec import describe_adapter\n"
        "from inflight.frontend.adapters.adapter_files import AdapterFiles\n"
        "files = AdapterFiles(Path(sys.argv[1]) / 'kept', lambda folder, name: describe_adapter(folder, name, 16))\n"
        "kept = files.keep('doll', Path(sys.argv[1]) / 'doll')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    (left,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert (left / "1" / "adapter_model.safetensors").exists()
    alive = AdapterFiles(tmp_path / "kept", describe)
    assert not left.exists()
    AdapterFiles(tmp_path / "kept", describe)
    assert alive.folder.exists(), "of a process that lives"
    alive.close()
    assert not alive.folder.exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    with pytest.raises(AdapterError, match="is no folder that only this user can write"):
        AdapterFiles(tmp_path / "kept", describe)


def test_a_full_disk_is_an_error_of_the_adapter(
    files: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_adapter(tmp_path / "doll")
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:4], 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(AdapterError, match=r"would leave less than .* of the disk at"):
        files.keep("doll", source)


def test_where_copies_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    assert files_folder() == tmp_path / "cache" / "adapters"
    monkeypatch.delenv("INFLIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert files_folder() == tmp_path / "home" / "inflight" / "adapters"
    monkeypatch.setenv("INFLIGHT_CACHE", "off")
    assert files_folder().name == f"inflight-adapters-{os.geteuid()}"
    monkeypatch.setenv("INFLIGHT_CACHE", "/dev/null/nowhere")
    assert files_folder().name == f"inflight-adapters-{os.geteuid()}"
