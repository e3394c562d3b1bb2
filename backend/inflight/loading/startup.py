"""`load_or_reuse`: a loaded model, from what an earlier load has kept, or from the checkpoint.

Only a load that has passed its check at load is kept, by the content of its checkpoint, its options, and this program
(`saved/identity.py`).  The file is mapped, not read: the engines of a machine share one copy.  Every byte is verified,
and a few tokens must have the logits of that load to the last bit; else the checkpoint is loaded and checked in full,
and that load is kept.  Only this imports transformers.

A spare process does that once, ahead of time (`heat`): its forks have the file mapped and verified.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from inflight.byte_sizes import format_bytes
from inflight.config import EngineConfig
from inflight.device.memory import available_memory
from inflight.grammars.demand import are_grammars_used
from inflight.kernels.cpu import build
from inflight.kernels.cpu.library import instruction_set, unavailable
from inflight.load_phases import enter_phase
from inflight.loading.grammars import share_grammars
from inflight.loading.load_errors import CannotKeep
from inflight.loading.loaded_model import LoadedModel, device_of
from inflight.loading.saved import weights_file
from inflight.loading.saved.cache_folder import CacheFolder, cache_folder
from inflight.loading.saved.identity import checkpoint_key, program_key
from inflight.loading.saved.mapped_file import Damaged, MappedFile
from inflight.loading.saved.prefetch import prefetched
from inflight.loading.saved.saved_model import content_of, model_of

__all__ = [
    "REUSED",
    "can_heat_further",
    "heat",
    "heat_further",
    "is_kept",
    "load_or_reuse",
    "may_heat",
    "place_of",
    "wait_until_kept",
]

REUSED = "reading the weights that an earlier start has packed and checked"
_log = logging.getLogger(__name__)
_writers: list[threading.Thread] = []
_later: list[Callable[[], None]] = []  # what `heat` leaves to `heat_further`
_hot: dict[str, MappedFile] = {}  # by key: mapped, and with the right logits, in this process or in its parent
_program_key = functools.cache(program_key)  # of the program that runs, not of one that is installed meanwhile


def load_or_reuse(config: EngineConfig) -> LoadedModel:
    """`loader.load`, or the same from a file that an earlier one has left.

    Raises:
        LoadError, ConfigError: see `loader.load`.
    """
    start = time.perf_counter()
    cache = key = None
    try:
        cache, key = place_of(config)
        reused = _reuse(cache, key, config, start)
        if reused is not None:
            return reused
    except CannotKeep as why:
        _log.info("no weights are kept for the next start: %s", why)
    enter_phase("importing transformers")
    from inflight.loading.loader import load

    loaded = load(config)
    if cache is not None and key is not None:
        _keep(cache, key, loaded)
    return loaded


def is_kept(config: EngineConfig) -> bool:
    """Whether it looks as if a load of this checkpoint is kept.  Touches no device, and not the kernels.

    They can find otherwise, if another program or CPU has left it.
    """
    try:
        cache = cache_folder()
        if cache is None or not (names := [path.name for path in cache.files()]):
            return False
        key = checkpoint_key(config, cache)
    except CannotKeep:
        return False
    return any(name.startswith(key) for name in names)


def may_heat(config: EngineConfig) -> bool:
    """Whether the engine's device can be asked for before a fork, which must find none that is open."""
    return config.device == "cpu" or (config.device == "auto" and not torch.backends.cuda.is_built())


def heat(config: EngineConfig, grammars: bool = True) -> bool:
    """Map the weights that are kept of this checkpoint, verify and try them, for forks of this process.

    Leaves no thread, and no memory but the shared pages: it computes on one thread, which changes no bit.

    Args:
        grammars: whether `heat_further` reads the vocabulary.

    Returns:
        Whether forks need nothing but their KV pool.
    """
    if not may_heat(config):
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cache, key = place_of(config)
        # The KV pool that is made for this is never written as a whole: that would be a second one beside an engine's.
        tried = msgspec.structs.replace(config, itl_target_ms=None)
        loaded = _reuse(cache, key, tried, time.perf_counter(), hold=True)
        if loaded is not None and grammars:
            facts = loaded.info.vocab_size, loaded.info.eos_token_ids
            _later.append(functools.partial(share_grammars, config, *facts))
    except CannotKeep:
        return False
    finally:
        torch.set_num_threads(threads)
    return key in _hot


def can_heat_further() -> bool:
    """Whether `heat_further` has something to do: an engine of this model has been asked for a grammar."""
    return bool(_later) and are_grammars_used()


def heat_further() -> None:
    """Read the vocabulary of grammars for forks of this process, too, if it is wanted."""
    while can_heat_further():
        with contextlib.suppress(BaseException):  # a panic, too.  No grammars: a request that has one is told
            _later.pop()()


def wait_until_kept(seconds: float | None = None) -> None:
    """Returns when all files are written, or cannot be; or when one took longer than `seconds`."""
    while _writers:
        _writers.pop().join(seconds)


def place_of(config: EngineConfig) -> tuple[CacheFolder, str]:
    """Where the load of this checkpoint is kept, and by which key.  Raises CannotKeep."""
    cache = cache_folder()
    if cache is None:
        raise CannotKeep("INFLIGHT_CACHE is off")
    if device_of(config.device).type != "cpu":
        raise CannotKeep("the device is no CPU")
    if (missing := unavailable()) is not None:
        raise CannotKeep(missing)
    program = _program_key(instruction_set(), build.LIBRARY, str(torch.__version__))
    return cache, f"{checkpoint_key(config, cache)}-{program}"


def _reuse(cache: CacheFolder, key: str, config: EngineConfig, start: float, hold: bool = False) -> LoadedModel | None:
    """The model that is kept by this key, if one is, and can be believed.

    Args:
        hold: the file for forks of this process.
    """
    name = f"{key}.iw"
    try:
        file = _mapped(cache, name, key)
        if file is None:
            checkpoint = key.partition("-")[0]
            if any(path.name.startswith(checkpoint) for path in cache.files()):
                enter_phase("in full: the weights kept of it are of another version or CPU")
            return None
        is_hot = _hot.get(key) is file
        if is_hot:
            file.map_pages()
        loaded = model_of(file, config, start, compare=not is_hot)
        if hold:
            _hot[key] = file
        return loaded
    except Damaged as why:
        _hot.pop(key, None)
        cache.drop(name)
        _log.warning("the kept weights %s are refused: %s; loading the checkpoint in full", cache.path / name, why)
    except (OSError, CannotKeep) as why:
        _log.warning("the kept weights are not read: %s; loading the checkpoint in full", why)
    return None


def _mapped(cache: CacheFolder, name: str, key: str) -> MappedFile | None:
    """The file, mapped and verified, perhaps by the process that this is a fork of; None if there is none."""
    hot = _hot.get(key)
    descriptor = cache.open(name)
    if descriptor is None:  # dropped, but a mapping remains
        return hot if hot is not None and hot.is_unchanged else None
    enter_phase(REUSED)
    try:
        for file in (hot, prefetched(key)):
            if file is not None and file.is_of(descriptor):
                return file
        _expect_room(os.fstat(descriptor).st_size)
        return MappedFile(descriptor, key)
    finally:
        os.close(descriptor)


def _expect_room(size: int) -> None:
    """Raise CannotKeep if so many bytes do not fit: a full load says what can be done, where a kernel would kill."""
    free = available_memory(torch.device("cpu"))
    if size > free:
        raise CannotKeep(f"they take {format_bytes(size)}, and {format_bytes(free)} are available")


def _keep(cache: CacheFolder, key: str, loaded: LoadedModel) -> None:
    """Write it in a thread of its own: a disk takes seconds, and the engine is ready."""
    try:
        content, tensors = content_of(loaded)
        if not key.startswith(checkpoint_key(loaded.config, cache)):
            raise CannotKeep("the checkpoint has changed while it was loaded")
    except CannotKeep as why:
        _log.info("no weights are kept for the next start: %s", why)
        return
    thread = threading.Thread(target=_write, args=(cache, key, content, tensors), name="keep-weights", daemon=True)
    _writers.append(thread)
    thread.start()


def _write(cache: CacheFolder, key: str, content: dict[str, Any], tensors: list[Tensor]) -> None:
    try:
        cache.write(
            f"{key}.iw",
            weights_file.size_of(tensors),
            lambda descriptor: weights_file.write(descriptor, key, content, tensors),
        )
    except (OSError, CannotKeep) as why:
        _log.warning("the weights are not kept for the next start: %s", why)
