"""`inflight weights` lists, verifies and drops what engines have kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from inflight.loading.saved import weights_file
from inflight_tools.cli import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two files, and a third that is damaged."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    folder = tmp_path / "weights"
    folder.mkdir(mode=0o700)
    for age, key in enumerate(["aa-1", "ab-2", "bb-3"]):
        with (folder / f"{key}.iw").open("wb") as file:
            content = {"dtype": "bfloat16", "model": f"/models/{key}"}
            weights_file.write(file.fileno(), key, content, [torch.arange(300_000)])
        os.utime(folder / f"{key}.iw", (age, age))
    with (folder / "bb-3.iw").open("r+b") as file:
        file.seek(-500_000, os.SEEK_END)
        file.write(b"\xff")
    return folder


def run(*arguments: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["weights", *arguments])
    return done.exit_code, (done.stdout + done.stderr).splitlines()


def test_lists_the_files_and_leaves_their_order(folder: Path) -> None:
    for _ in range(2):
        status, lines = run()
        assert (status, [line.split()[0] for line in lines]) == (0, ["aa-1.iw", "ab-2.iw", "bb-3.iw"])
    assert lines[0].split()[1:] == ["2", "MiB", "used", "1970-01-01", "00:00", "bfloat16", "/models/aa-1"]


def test_verifies_every_byte(folder: Path) -> None:
    status, lines = run("verify")
    assert (status, [line.split()[0] for line in lines]) == (1, ["whole", "whole", "damaged"])
    assert "its weights are changed" in lines[2]
    assert run("verify", "aa", "ab")[0] == 0


def test_what_is_no_file_is_damaged(folder: Path) -> None:
    (folder / "c.iw").symlink_to(folder / "aa-1.iw")
    (folder / "d.iw").mkdir()
    os.mkfifo(folder / "e.iw")
    status, lines = run()
    assert (status, len(lines)) == (1, 6)
    assert {line.split(":")[0] for line in lines if line.startswith("damaged")} == {
        "damaged  c.iw",
        "damaged  d.iw",
        "damaged  e.iw",
    }
    assert run("drop", "c", "d", "e") == (1, ["dropped c.iw", "cannot drop d.iw: Is a directory", "dropped e.iw"])


def test_drops_what_is_named(folder: Path) -> None:
    assert run("drop") == (2, ["inflight: name what to drop, or add --all"])
    assert run("drop", "x")[0] == 2
    assert run("drop", "a") == (0, ["dropped aa-1.iw", "dropped ab-2.iw"])
    assert [path.name for path in folder.glob("*.iw")] == ["bb-3.iw"]
    assert run("drop", "--all") == (0, ["dropped bb-3.iw"])
    assert run() == (0, [])


def test_says_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE", "off")
    assert run() == (2, ["inflight: INFLIGHT_CACHE is off: nothing is kept"])
