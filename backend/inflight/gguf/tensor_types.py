"""Types of tensors in a GGUF file: numbers, or blocks of codes with scales.

Sizes and numbers of the types: ggml.h and ggml-common.h of https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PLAIN", "READABLE", "TYPE_NAMES", "TensorType"]


class TensorType(NamedTuple):
    """A tensor's rows consist of blocks of `numbers` numbers in `num_bytes` bytes."""

    name: str
    numbers: int
    num_bytes: int


PLAIN = ("F32", "F16", "BF16")

# All types that ggml has, or had, by their number.  The format's own order.
TYPE_NAMES: dict[int, str] = {
    **dict(enumerate(["F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"])),
    **dict(enumerate(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"], 10)),
    **dict(enumerate(["IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"], 20)),
    **dict(enumerate(["Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0"], 31)),
    39: "MXFP4",
    40: "NVFP4",
}
_SIZES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
# The types that can be served.
READABLE: dict[int, TensorType] = {
    number: TensorType(name, *_SIZES[name]) for number, name in TYPE_NAMES.items() if name in _SIZES
}
