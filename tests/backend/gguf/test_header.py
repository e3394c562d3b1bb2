"""Headers of GGUF files, also of hostile ones: a line that names key or tensor, and no memory on the file's word."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_files import random_blocks, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.gguf.architectures import config_of
from inflight.gguf.header import HEADER_BYTES, GgufError, read_header
from inflight.gguf.unpacked import unpacked

HUGE = 2**64 - 1
KEYS: dict[str, Any] = {
    "x.text": "Ça va",
    "x.count": 7,
    "x.flag": True,
    "x.small": 1e-5,
    "x.words": ["a", "", "你好"],
    "x.numbers": [1.5, 2.5],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "a.weight": (np.arange(12, dtype=np.float32).reshape(3, 4), "F32"),
        "b.weight": (random_blocks((2, 512), "Q6_K"), "Q6_K"),
    }
    return write_gguf(tmp_path / "x.gguf", "x", KEYS, tensors)


def patched(file: Path, at: int | bytes, change: bytes, behind: int = 0) -> Path:
    """Overwrite bytes at a place, or behind the first occurrence of some."""
    content = bytearray(file.read_bytes())
    place = at if isinstance(at, int) else content.index(at) + len(at) + behind
    content[place : place + len(change)] = change
    file.write_bytes(content)
    return file


def test_it_is_read_as_the_package_gguf_reads_it(file: Path) -> None:
    found, theirs = read_header(file), GGUFReader(file)
    for key, value in KEYS.items():
        ours = found.metadata[key]
        assert list(ours) == value if key == "x.numbers" else ours == value
    assert found.metadata["general.architecture"] == "x"
    assert [tensor.name for tensor in theirs.tensors] == list(found.tensors)
    for tensor in theirs.tensors:
        info = found.tensors[tensor.name]
        assert (info.start, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(tensor.shape.tolist()[::-1]) and info.type.name == tensor.tensor_type.name
        assert info.rows == (tensor.data.view(np.uint8) if info.type.name == "F32" else tensor.data).shape


@pytest.mark.parametrize(
    ("at", "change", "behind", "message"),
    [
        (0, b"PK", 0, "it is no GGUF file: it does not begin with GGUF; give a Hugging Face checkpoint directory"),
        (4, struct.pack("<I", 1), 0, r"it has version 1 of the format \(served: 2 and 3\); convert the model anew"),
        (4, struct.pack(">I", 3), 0, "it is big-endian; convert it with gguf-convert-endian of the package gguf"),
        (
            8,
            struct.pack("<Q", HUGE),
            0,
            "the number of tensors is 18446744073709551615, for which the file is too small",
        ),
        (16, struct.pack("<Q", 2**40), 0, "the number of keys is 1099511627776, for which the file is too small"),
        (24, struct.pack("<Q", HUGE), 0, "key 0 of the metadata would end beyond the file"),
        (b"x.text", struct.pack("<Q", HUGE), 4, "x.text would end beyond the file of [0-9]+ bytes; download it again"),
        (b"x.text", b"\xff", 12, "x.text is not UTF-8"),
        (b"x.count", struct.pack("<I", 99), 0, "x.count has a value of type 99, which the format does not have here"),
        (b"x.words", struct.pack("<Q", HUGE), 8, "x.words has 18446744073709551615 entries, for which the file is too"),
        (b"x.words", struct.pack("<I", 9), 4, "x.words has a value of type 9, which the format does not have here"),
        (b"x.numbers", struct.pack("<Q", HUGE), 8, "x.numbers would end beyond the file"),
        (b"x.number", b"\n", 0, "key 6 of the metadata is no name of 1 to 256 printable characters"),
        (b"a.weight", struct.pack("<I", 2**31), 0, r"a.weight has 2147483648 dimensions \(1 to 4\)"),
        (b"a.weight", struct.pack("<Q", 0), 4, r"a.weight has shape \[3, 0\], which contains nothing"),
        (b"a.weight", struct.pack("<Q", HUGE), 4, "a.weight, F32 of shape .* would end at byte .*: it is incomplete"),
        (b"a.weight", struct.pack("<Q", 40), 12, "a.weight and b.weight overlap"),
        (
            b"a.weight",
            struct.pack("<I", 34),
            20,
            r"a.weight is stored as TQ1_0 \(served: F32, F16, Q4_0, .*\); use a file",
        ),
        (b"a.weight", struct.pack("<I", 39), 20, "a.weight is stored as MXFP4 .*Q4_K_M, Q6_K or Q8_0, or its Hugging"),
        (b"a.weight", struct.pack("<I", 12345), 20, "a.weight is stored as the unknown type 12345"),
        (b"b.weight", struct.pack("<Q", 500), 4, "b.weight has rows of 500 numbers, and blocks of Q6_K have 256"),
        (b"b.weight", struct.pack("<Q", HUGE), 24, "b.weight begins at .*, which is no multiple of 32"),
        (b"b.weight", struct.pack("<Q", 2**63), 24, "b.weight, Q6_K .* would end at byte .*: it is incomplete"),
        (b"b.weigh", b"\x00", 0, "the name of tensor 1 is no name"),
    ],
)
def test_what_is_wrong_is_named(file: Path, at: int | bytes, change: bytes, behind: int, message: str) -> None:
    with pytest.raises(GgufError, match=message) as error:
        read_header(patched(file, at, change, behind))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_names_twice(file: Path) -> None:
    patched(file, file.read_bytes().index(b"b.weight"), b"a.weight")
    with pytest.raises(GgufError, match=r"it has two tensors called a.weight"):
        read_header(file)
    patched(file, file.read_bytes().index(b"x.flag") - 0, b"x.text")
    with pytest.raises(GgufError, match=r"its metadata has 'x.text' twice"):
        read_header(file)


@pytest.mark.parametrize("alignment", [0, 7, 24, 2**31])
def test_alignments(tmp_path: Path, alignment: int) -> None:
    file = write_gguf(tmp_path / "x.gguf", "x", {"x.y": alignment}, {})
    content = file.read_bytes().replace(b"\x03\0\0\0\0\0\0\0x.y", struct.pack("<Q", 17) + b"general.alignment")
    file.write_bytes(content)
    with pytest.raises(GgufError, match=r"general.alignment is [0-9]+, not a power of 2"):
        read_header(file)


def test_one_of_several_files(file: Path, tmp_path: Path) -> None:
    part = file.rename(tmp_path / "x-00002-of-00003.gguf")
    with pytest.raises(GgufError, match="it is one of several files of a model; merge them: llama-gguf-split --merge"):
        read_header(part)
    renamed = write_gguf(tmp_path / "renamed.gguf", "x", {"split.count": 3}, {})
    with pytest.raises(GgufError, match="llama-gguf-split --merge"):
        read_header(renamed)
    read_header(part.rename(tmp_path / "x-00001-of-00001.gguf"))


def test_an_empty_and_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(GgufError, match="the file is empty"):
        read_header(tmp_path / "empty.gguf")
    with pytest.raises(GgufError, match="it cannot be read: No such file"):
        read_header(tmp_path / "missing.gguf")


def test_other_architectures(tmp_path: Path) -> None:
    with pytest.raises(
        GgufError, match=r"its architecture is 'deepseek2' \(served as GGUF: llama, .*\); use the model's"
    ):
        config_of(read_header(write_gguf(tmp_path / "x.gguf", "deepseek2", {}, {})))


def test_a_header_takes_little_memory(tmp_path: Path) -> None:
    """A file of a GiB, most of it a hole, that says that all of it is one array of numbers, or of empty words."""
    file = tmp_path / "x.gguf"
    for kind, message in (
        (0, "x would end beyond 64 MiB, which a header may have"),
        (8, "x has .* entries, for which"),
    ):
        start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x"
        file.write_bytes(start + struct.pack("<IIQ", 9, kind, 900 << 20))
        with file.open("r+b") as opened:
            opened.truncate(1 << 30)
        tracemalloc.start()
        with pytest.raises(GgufError, match=message):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < HEADER_BYTES
        tracemalloc.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from checkpoints import make_checkpoint
    from gguf_files import as_gguf

    folder = tmp_path_factory.mktemp("whole")
    as_gguf(make_checkpoint("llama", folder), folder / "model.gguf", "Q8_0")
    return (folder / "model.gguf").read_bytes()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=4),
)
def test_any_damage_ends_in_one_line(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: float, changes: list[tuple[float, bytes]]
) -> None:
    """Or is not noticed, where it changes numbers, letters or names of keys that are not needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header = whole.index(b"blk.1.ffn_up.weight") + 64  # tensors follow
    content = bytearray(whole)
    for place, change in changes:
        at = int(place * header)
        content[at : at + len(change)] = change
    file = tmp_path / "model.gguf"
    file.write_bytes(content if length > 0.5 else content[: int(2 * length * len(content))])
    try:
        unpacked(file)
    except GgufError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
