"""llama.cpp's blocks: every number bit for bit, and codes and scales that contain all of a block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf_files import decoded
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.gguf.tensor_types import READABLE
from inflight.loading.quantization.block_weight import BLOCK_KINDS, BlockWeight


def half(block: bytes, at: int) -> np.float32:
    return np.frombuffer(block[at : at + 2], np.float16).astype(np.float32)[0]


def q4_0(b: bytes) -> list[np.float32]:
    return [half(b, 0) * np.float32((b[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q4_1(b: bytes) -> list[np.float32]:
    return [half(b, 0) * np.float32(b[4 + i % 16] >> 4 * (i // 16) & 15) + half(b, 2) for i in range(32)]


def fifth(b: bytes, at: int, i: int) -> int:
    return (b[at + i % 16] >> 4 * (i // 16) & 15) | (int.from_bytes(b[at - 4 : at], "little") >> i & 1) << 4


def q5_0(b: bytes) -> list[np.float32]:
    return [half(b, 0) * np.float32(fifth(b, 6, i) - 16) for i in range(32)]


def q5_1(b: bytes) -> list[np.float32]:
    return [half(b, 0) * np.float32(fifth(b, 8, i)) + half(b, 2) for i in range(32)]


def q8_0(b: bytes) -> list[np.float32]:
    return [half(b, 0) * np.float32(np.frombuffer(b[2 + i : 3 + i], np.int8)[0]) for i in range(32)]


def six_bits(b: bytes, group: int) -> tuple[int, int]:
    s = b[4:16]
    if group < 4:
        return s[group] & 63, s[group + 4] & 63
    return (s[group + 4] & 15) | (s[group - 4] >> 6) << 4, (s[group + 4] >> 4) | (s[group] >> 6) << 4


def k_number(b: bytes, i: int, code: int) -> np.float32:
    scale, least = six_bits(b, i // 32)
    return half(b, 0) * np.float32(scale) * np.float32(code) - half(b, 2) * np.float32(least)


def q4_k(b: bytes) -> list[np.float32]:
    return [k_number(b, i, b[16 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15) for i in range(256)]


def q5_k(b: bytes) -> list[np.float32]:
    codes = [b[48 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15 for i in range(256)]
    return [k_number(b, i, code | (b[16 + i % 32] >> i // 32 & 1) << 4) for i, code in enumerate(codes)]


def q6_k(b: bytes) -> list[np.float32]:
    out = []
    for i in range(256):
        part, within = divmod(i, 128)
        low = b[64 * part + within % 64] >> 4 * (within // 64) & 15
        high = b[128 + 32 * part + within % 32] >> 2 * (within // 32) & 3
        scale = np.frombuffer(b[192 + i // 16 : 193 + i // 16], np.int8)[0]
        out.append(half(b, 208) * np.float32(scale) * np.float32((low | high << 4) - 32))
    return out


DECODERS: dict[str, Callable[[bytes], list[np.float32]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
FEWER_BITS = sorted(BLOCK_KINDS.keys() - DECODERS.keys())


def plausible(kind: str, rows: int) -> np.ndarray:
    """Two blocks a row of any codes, with scales that are numbers."""
    size = BLOCK_KINDS[kind].num_bytes
    content = np.random.default_rng(5).integers(0, 256, (rows, 2 * size), dtype=np.uint8)
    for offset in BLOCK_KINDS[kind].halves:
        content.reshape(-1, size)[:, offset : offset + 2] = (0x34, 0x12)
    return content


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32), st.data())
@pytest.mark.parametrize("kind", DECODERS)
def test_numbers_are_those_of_an_independent_decoder(
    kind: str, rows: int, blocks: int, seed: int, data: st.DataObject
) -> None:
    """Of any bytes: also with scales that are 0, infinite, or no numbers."""
    size = BLOCK_KINDS[kind].num_bytes
    content = np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.array([DECODERS[kind](block.tobytes()) for block in content.reshape(-1, size)], np.float32)
    weight = BlockWeight(BLOCK_KINDS[kind], torch.from_numpy(content))
    assert weight.shape == (rows, blocks * BLOCK_KINDS[kind].numbers)
    start = data.draw(st.integers(0, rows - 1))
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected.reshape(weight.shape))
    np.testing.assert_array_equal(weight.dequantize(start, start + 1)[0].numpy(), expected.reshape(weight.shape)[start])


@pytest.mark.parametrize("kind", DECODERS)
def test_codes_and_scales_contain_all_of_a_block(kind: str) -> None:
    """A kernel can be given them instead of the bytes."""
    weight = BlockWeight(BLOCK_KINDS[kind], torch.from_numpy(plausible(kind, 80)))
    parts = weight.parts(1, 71)
    assert parts is not None and parts.codes.dtype == torch.uint8
    assert torch.equal(parts.numbers().view(70, -1), weight.dequantize(1, 71))
    bits = int(kind[1])
    assert int(parts.codes.max()) == 2**bits - 1 and int(parts.codes.min()) == 0
    scales = parts.scale if parts.scale_codes is None else parts.scale_codes
    group = parts.codes.shape[1] // scales.shape[1]
    assert group == (16 if kind == "Q6_K" else 32)
    assert (parts.min is None) is (kind in ("Q4_0", "Q5_0", "Q8_0", "Q6_K"))


@pytest.mark.parametrize("kind", FEWER_BITS)
def test_fewer_bits_are_those_of_the_package_gguf(kind: str) -> None:
    content = plausible(kind, 3)
    weight = BlockWeight(BLOCK_KINDS[kind], torch.from_numpy(content))
    np.testing.assert_array_equal(weight.dequantize().numpy(), decoded(content, kind))
    assert weight.parts() is None


def test_every_type_with_blocks_has_a_kind_of_the_same_size() -> None:
    sizes = {entry.name: entry for entry in READABLE.values() if entry.numbers > 1}
    assert sizes.keys() == BLOCK_KINDS.keys()
    assert all(BLOCK_KINDS[name][:3] == entry for name, entry in sizes.items())
