"""An adapter's folder in PEFT's format: read, checked, and named by its content.  No torch.

    adapter_config.json          which modules, ranks and scales (`peft_config.py`)
    adapter_model.safetensors    two matrices for each module (`tensor_header.py`)

The id covers both files, so a name that stands for other weights after a reload has another id, and the same bytes
have the same id on any server.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import msgspec

from inflight.adapters.adapter_error import AdapterError
from inflight.adapters.peft_config import parse_config
from inflight.adapters.tensor_header import MAX_FILE_BYTES, MAX_HEADER_BYTES, Pair, pairs_of
from inflight.engine.adapter import AdapterRef

__all__ = ["CONFIG", "WEIGHTS", "AdapterContent", "AdapterError", "describe_adapter", "read_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_CHUNK = 1 << 19  # a millisecond, with its digest


@dataclass(frozen=True)
class AdapterContent:
    """
    Attributes:
        pairs: by the modules' paths in the model.
        scales: what each module's B A is multiplied by: alpha / r, or alpha / sqrt(r) with `use_rslora`.
        data: the bytes of all tensors.
    """

    pairs: dict[str, Pair]
    scales: dict[str, float]
    data: mmap.mmap | bytearray


def describe_adapter(folder: str | Path, name: str, max_lora_rank: int) -> AdapterRef:
    """Read and check an adapter without loading it; its weights are read once, for their digest.

    Args:
        name: for clients and messages.
        max_lora_rank: a larger rank is refused.

    Raises:
        AdapterError: it cannot be served.
    """
    folder = Path(folder)
    with _named(name):
        content, content_id = _read(folder, max_lora_rank, keeps_data=False)
        return AdapterRef(name, content_id, str(folder), max(pair.rank for pair in content.pairs.values()))


def read_adapter(ref: AdapterRef, max_lora_rank: int, pause: Callable[[], None] = lambda: None) -> AdapterContent:
    """The adapter with its weights, which are the ones that `ref` names.

    Args:
        pause: called after each millisecond of work, more or less.

    Raises:
        AdapterError: it cannot be served, or its files have changed.
    """
    with _named(ref.name):
        content, content_id = _read(Path(ref.path), max_lora_rank, True, pause)
        if content_id != ref.id:
            raise AdapterError(
                f"its files have changed: their digest is {content_id}, not {ref.id}; load it again under its name, "
                "and never change the files of a loaded adapter"
            )
        return content


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors name the adapter."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from None
    except OSError as error:
        raise AdapterError(f"adapter {name!r}: its files cannot be read: {error.strerror or error}") from None


def _read(
    folder: Path, max_lora_rank: int, keeps_data: bool, pause: Callable[[], None] = lambda: None
) -> tuple[AdapterContent, str]:
    """The content, whose data is empty unless `keeps_data`, and its id.

    The header and the bytes come from one open file, whose digest is made of what was read: another process that
    replaces it meanwhile changes nothing.
    """
    with _open(folder, CONFIG, _MAX_CONFIG_BYTES) as (file, size):
        text = _exactly(file, size, CONFIG)
    config = parse_config(text)
    digest = hashlib.blake2b(digest_size=16)
    canonical = msgspec.json.encode(msgspec.json.decode(text), order="sorted")
    digest.update(len(canonical).to_bytes(8, "little"))
    digest.update(canonical)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder / 'adapter_model.bin'} is a pickle, which can run code; save the adapter as {WEIGHTS}"
        )
    with _open(folder, WEIGHTS, MAX_FILE_BYTES) as (file, size):
        start = _exactly(file, min(size, 8), WEIGHTS)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise AdapterError(f"{WEIGHTS} is no safetensors file, or cut off; save the adapter again")
        header = _exactly(file, length, WEIGHTS)
        num_bytes = size - 8 - length
        pause()
        pairs = pairs_of(header, num_bytes)
        pause()
        scales = _scales(pairs, config.matching(pairs), max_lora_rank)
        digest.update(start + header)
        pause()
        data = _digested(file, num_bytes, digest, keeps_data, pause)
    return AdapterContent(pairs, scales, data), digest.hexdigest()


def _scales(pairs: dict[str, Pair], wanted: dict[str, tuple[int, float]], max_lora_rank: int) -> dict[str, float]:
    scales = {}
    for module, (rank, scale) in wanted.items():
        got = pairs[module].rank
        if got != rank:
            raise AdapterError(
                f"{module} has rank {got}, and {CONFIG} says {rank}; the files are of different adapters: save it again"
            )
        if rank > max_lora_rank:
            raise AdapterError(
                f"{module} has rank {rank}: at most max_lora_rank={max_lora_rank}; raise that key in model.json"
            )
        scales[module] = scale
    return scales


@contextmanager
def _open(folder: Path, name: str, limit: int) -> Iterator[tuple[BufferedReader, int]]:
    """A regular file and its size; it never waits, whatever lies there."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError(f"{folder} has no {name}: give a folder that PEFT's save_pretrained has written") from None
    except ValueError as error:  # a null byte in the path
        raise AdapterError(f"{str(folder)!a} is no path: {error}") from None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AdapterError(f"{folder / name} is no file; give a folder that PEFT's save_pretrained has written")
        if found.st_size > limit:
            raise AdapterError(f"{folder / name} has {found.st_size} bytes: at most {limit}; it is no adapter")
        yield file, found.st_size


def _exactly(file: BufferedReader, size: int, name: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise AdapterError(f"{name} is cut off; copy it again")
    return data


def _digested(
    file: BufferedReader, size: int, digest: hashlib.blake2b, keeps: bool, pause: Callable[[], None]
) -> mmap.mmap | bytearray:
    """Read the rest of the file, of `size` bytes, into the digest, in chunks."""
    with suppress(OSError):  # a file system without it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    data = mmap.mmap(-1, size if keeps else min(size, _CHUNK), mmap.MAP_PRIVATE)  # cleared page by page
    with memoryview(data) as view:
        for at in range(0, size, _CHUNK):
            place = at if keeps else 0
            with view[place : place + min(_CHUNK, size - at)] as chunk:
                if file.readinto(chunk) != len(chunk):
                    raise AdapterError(f"{WEIGHTS} is cut off; copy it again")
                digest.update(chunk)
            pause()
    return data if keeps else bytearray()
