"""A short id of a checkpoint's content: copies have the same one, a fine-tuned checkpoint has another.  No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from inflight.hub import gguf_file, snapshot

__all__ = ["checkpoint_id"]

_WHOLE = ("config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_NUM_SAMPLES, _SAMPLE_BYTES = 8, 4096


def checkpoint_id(source: str, revision: str | None = None) -> str | None:
    """16 hexadecimal digits; None if the files are not on this machine.

    Files of weights contribute their names, sizes and 32 KiB of content: reading gigabytes would take minutes, and
    training changes every weight.

    Args:
        source: checkpoint directory, GGUF file or hub id.
    """
    file, folder = gguf_file(source, revision), snapshot(source, revision)
    if folder is None:
        return None
    digest = hashlib.sha256()
    try:
        for path in (folder / name for name in _WHOLE):
            if path.is_file():
                digest.update(f"{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
        found = [path for pattern in _WEIGHTS for path in folder.glob(pattern)] if file is None else [file]
        for path in sorted(found):
            _add_samples(digest, path)
    except OSError:
        return None
    return digest.hexdigest()[:16]


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
        for number in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
