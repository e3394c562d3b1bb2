"""Kept weights that cannot be believed are refused by name, and made anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from startup_rig import CHAIN, in_codes, is_reused, logits, start

from inflight.kernels.cpu import library
from inflight.loading.saved import mapped_file, weights_file
from inflight.loading.saved.mapped_file import Damaged, Header, MappedFile, read_header
from inflight.loading.saved.weights_file import tensors_of

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture


@pytest.mark.parametrize("stored", [CHAIN, "Q4_K"])
def test_a_changed_bit_in_any_tensor_of_kept_codes_is_found_and_a_changed_checkpoint_is_loaded(
    stored: str, tmp_path: Path, cache: Path, caplog: Log
) -> None:
    path = in_codes(stored, tmp_path)
    expected = logits(start(path, dtype="float32"))
    (file,) = cache.glob("*.iw")
    with file.open("r+b") as opened:
        layout = read_header(opened.fileno()).layout
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape, _ in layout.tensors]
        places = [layout.start + offset + size // 2 for size, (*_, offset) in zip(sizes, layout.tensors)]
        for at in places:
            byte = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([byte[0] ^ 16]), at)
            with pytest.raises(Damaged, match="weights are changed"):
                MappedFile(opened.fileno(), file.stem)
            os.pwrite(opened.fileno(), byte, at)
        MappedFile(opened.fileno(), file.stem)
        os.pwrite(opened.fileno(), bytes([os.pread(opened.fileno(), 1, places[-1])[0] ^ 1]), places[-1])
    caplog.clear()
    assert all(map(np.array_equal, logits(start(path, dtype="float32")), expected))
    assert "weights are changed; loading the checkpoint in full" in caplog.text
    caplog.clear()
    start(path, dtype="float32")
    assert is_reused(caplog)
    weights = Path(path) if stored == "Q4_K" else Path(path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # of a norm or a code
    weights.write_bytes(content)
    start(path, dtype="float32")
    assert not is_reused(caplog)


def flipped(at: Callable[[Header], int]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def flip(path: Path, _: pytest.MonkeyPatch) -> None:
        with path.open("r+b") as file:
            position = at(read_header(file.fileno()))
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 4]))

    return flip


def truncated(path: Path, _: pytest.MonkeyPatch) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path, _: pytest.MonkeyPatch) -> None:
    os.truncate(path, 0)


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def for_everyone(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)


def linked(path: Path, _: pytest.MonkeyPatch) -> None:
    elsewhere = path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(elsewhere)


def renamed(path: Path, _: pytest.MonkeyPatch) -> None:
    """The whole file of another key."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    with path.open("wb") as file:
        weights_file.write(file.fileno(), "another", header.content, tensors)


def of_other_logits(path: Path, _: pytest.MonkeyPatch) -> None:
    """A whole file with a decoder that computes something else, as a library's other `cos` would."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    header.content["decoder"]["rotary_scaling"] *= 1.0001
    with path.open("wb") as file:
        weights_file.write(file.fileno(), header.key, header.content, tensors)


def of_another_version(path: Path, _: pytest.MonkeyPatch) -> None:
    """A whole file with other tables."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    header.content["decoder"]["another_factor"] = 2.0
    with path.open("wb") as file:
        weights_file.write(file.fileno(), header.key, header.content, tensors)


REFUSED: list[tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = [
    (truncated, "truncated"),
    (emptied, "truncated"),
    (flipped(lambda header: 3), "format"),
    (flipped(lambda header: 9), "format"),
    (flipped(lambda header: 14), "header is changed"),
    (flipped(lambda header: 200), "header is changed"),
    (flipped(lambda header: header.layout.start), "weights are changed"),
    (flipped(lambda header: header.layout.start + header.layout.size - 1), "weights are changed"),
    (of_another_user, "belongs to user"),
    (for_everyone, "can be written by other users"),
    (linked, "symbolic links"),
    (renamed, "another, and"),
    (of_other_logits, "to the last bit"),
    (of_another_version, "another version"),
]


@pytest.mark.parametrize("damage, why", REFUSED, ids=[f"{number}-{why}" for number, (_, why) in enumerate(REFUSED)])
def test_what_cannot_be_believed_is_refused_and_made_anew(
    damage: Callable[[Path, pytest.MonkeyPatch], None], why: str, llama: str, cache: Path, caplog: Log
) -> None:
    expected = logits(start(llama))
    (file,) = cache.glob("*.iw")
    with pytest.MonkeyPatch.context() as monkeypatch:
        damage(file, monkeypatch)
        caplog.clear()
        assert all(map(np.array_equal, logits(start(llama)), expected))
    (warning,) = [record.message for record in caplog.records if "loading the checkpoint in full" in record.message]
    assert why in warning
    assert not is_reused(caplog)
    start(llama)
    assert is_reused(caplog) or damage in (of_another_user,)
    start(llama)
    assert is_reused(caplog)


def test_tensors_of_several_blocks_come_back_and_a_changed_bit_in_any_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_file, "BLOCK", 4096)
    monkeypatch.setattr(mapped_file, "BLOCK", 4096)
    tensors = [torch.arange(3000), torch.ones(7, 5, dtype=torch.bfloat16), torch.empty(0), torch.arange(9000)]
    with (tmp_path / "a.iw").open("w+b") as file:
        weights_file.write(file.fileno(), "a", {}, tensors)
        layout = read_header(file.fileno(), "a").layout
        assert len(layout.sums) == -(-layout.size // 4096) > 20
        found = tensors_of(MappedFile(file.fileno(), "a"))
        assert all(map(torch.equal, found, tensors))
        assert [each.dtype for each in found] == [each.dtype for each in tensors]
        for block in range(len(layout.sums)):
            at = layout.start + min(block * 4096 + 77, layout.size - 1)
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
            with pytest.raises(Damaged, match="weights are changed"):
                MappedFile(file.fileno(), "a")
            os.pwrite(file.fileno(), byte, at)
