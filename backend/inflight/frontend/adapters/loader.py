"""Loads, reloads and unloads the adapters of a model instance, one after another, in a thread.  No torch, no Triton."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from inflight.adapters.spec import AdapterError, describe_adapter
from inflight.config import ConfigError, EngineConfig
from inflight.engine.messages import LoadAdapter, Question
from inflight.frontend.adapters.adapter_files import AdapterFiles, KeptAdapter, files_folder
from inflight.frontend.adapters.multi_lora import check_name, read_multi_lora
from inflight.frontend.adapters.registry import AdapterRegistry
from inflight.frontend.errors import RequestError, shown

__all__ = ["AdapterLoader"]

_LOAD_SECONDS = 300.0  # for the engine to load an adapter

AskEngine = Callable[[Question], "Future[Any]"]


class AdapterLoader:
    """The adapters of a model instance.  With `enable_lora` off it has none, and no thread.

    Args:
        config: options of the model.
        model_dir: the version's folder, with `multi_lora.json`.
        log: takes (level, line) with level "info", "warn" or "error".
        counted: called with the outcome of a load ("loaded" or "refused") and its seconds.
        root: of the copies; for tests.

    Attributes:
        registry: the adapters that requests can choose.
        tell_others: passes a load or an unload on to the instances that share the engine, and returns how many have
            done it.

    Raises:
        ConfigError, FileNotFoundError: an adapter of `multi_lora.json` cannot be served, or the file not read.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        log: Callable[[str, str], None],
        counted: Callable[[str, float], None] = lambda outcome, seconds: None,
        root: Path | None = None,
    ) -> None:
        self._max_name_bytes = config.max_name_bytes
        self._log, self._counted = log, counted
        self._allowed = [Path(folder).resolve() for folder in config.lora_allowed_paths]
        self._ask_engine: AskEngine | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="adapters", daemon=True)
        self._files: AdapterFiles | None = None
        self._fixed: Mapping[str, Path] = {}
        self.tell_others: Callable[[Mapping[str, Any]], int] = lambda change: 0
        if not config.enable_lora:
            self.registry = AdapterRegistry(False)
            return
        self._fixed = read_multi_lora(model_dir, required=not self._allowed, max_name_bytes=config.max_name_bytes)
        self.registry = AdapterRegistry(True, {name: str(folder) for name, folder in self._fixed.items()})
        describe = lambda folder, name: describe_adapter(folder, name, config.max_lora_rank)  # noqa: E731
        try:
            self._files = AdapterFiles(root or files_folder(), describe)
            for name, folder in self._fixed.items():
                self.registry.put(self._files.keep(name, folder))
        except AdapterError as error:
            self.stop()
            raise ConfigError(f"multi_lora.json: {error}") from None
        except OSError as error:
            self.stop()
            raise ConfigError(
                f"{root or files_folder()}: adapters cannot be copied to it: {error.strerror or error}; free space on "
                "its disk, or set INFLIGHT_CACHE to a folder on another disk"
            ) from None

    def start(self, ask_engine: AskEngine) -> None:
        """Let the engine load the adapters of `multi_lora.json`; from then on `load` and `unload` work.

        Raises:
            ConfigError: one of them does not fit the checkpoint.
        """
        self._ask_engine = ask_engine
        if self._files is None:
            return
        answers = [(name, ask_engine(LoadAdapter(self._kept(name).ref))) for name in self._fixed]
        for name, answer in answers:
            try:
                found = answer.result(_LOAD_SECONDS)
            except RequestError as error:
                raise ConfigError(f"multi_lora.json: {error.message}") from None
            except FutureTimeoutError:
                raise ConfigError(
                    f"multi_lora.json: the engine did not load {name!r} within {_LOAD_SECONDS:g} s"
                ) from None
            self._log("info", f"adapter {name!r}: {found['id']}, rank {found['rank']}")
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the copies.  Safe to repeat."""
        if self._thread.ident is not None:
            self._work.put(None)
            self._thread.join()
        if self._files is not None:
            self._files.close()

    def load(self, name: str, path: str | None, in_place: bool) -> Future[bytes]:
        """Load an adapter under a name.

        Args:
            path: folder; None: that of `multi_lora.json`.
            in_place: replace the adapter that has the name, which open requests keep.

        Returns:
            What is loaded, as JSON, once the engine has it; or a RequestError.

        Raises:
            RequestError: INVALID_ARG; the request itself is wrong.
        """
        folder = self._folder_of(name, path)
        self._check_free(name, in_place)
        within = None if folder == self._fixed.get(name) else self._allowed
        return self._do(lambda: self._load(name, folder, within, in_place))

    def unload(self, name: str) -> Future[bytes]:
        """Take a name away; open requests keep their adapter, which leaves with the last of them.

        Raises:
            RequestError: INVALID_ARG; there is no such adapter.
        """
        self._check_enabled()
        if self.registry.get(name) is None:
            raise _not_found(name)
        return self._do(lambda: self._unload(name))

    def follow(self, change: Mapping[str, Any]) -> bool:
        """Do what another instance with the same engine has done; returns whether that worked.  Any thread."""
        try:
            if "unload" in change:
                self.registry.remove(change["unload"])
            elif self._files is not None:
                kept = self._files.keep(change["load"], Path(change["path"]))
                if kept.ref.id != change["id"]:
                    raise AdapterError(f"adapter {change['load']!r} has changed in the meantime")
                self.registry.put(kept)
        except AdapterError as error:
            self._log("error", f"what another instance has loaded cannot be loaded here: {error}")
            return False
        return True

    # -- the thread ------------------------------------------------------------------------

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _do(self, work: Callable[[], dict[str, Any]]) -> Future[bytes]:
        answer: Future[bytes] = Future()

        def run() -> None:
            try:
                answer.set_result(msgspec.json.encode(work()))
            except RequestError as error:
                answer.set_exception(error)
            except Exception as error:  # the thread serves later requests, too
                self._log("error", f"adapters: {type(error).__name__}: {error}")
                answer.set_exception(RequestError("INTERNAL", f"internal error: {type(error).__name__}: {error}"))

        self._work.put(run)
        return answer

    def _load(self, name: str, folder: Path, within: list[Path] | None, in_place: bool) -> dict[str, Any]:
        self._check_free(name, in_place)  # another request may have been first
        start = time.monotonic()
        try:
            kept = self._checked(name, folder, within)
        except RequestError as error:
            self._counted("refused", time.monotonic() - start)
            self._log("warn", f"adapter {name!r} was not loaded: {error.message}")
            raise
        before = self.registry.get(name)
        number = self.registry.put(kept)
        seconds = time.monotonic() - start
        self._counted("loaded", seconds)
        was = "" if before is None else f", in the place of {before.ref.id}"
        self._log("info", f"adapter {name!r}: {kept.ref.id}, rank {kept.ref.rank}, from {folder}{was}")
        change = {"load": name, "id": kept.ref.id, "path": kept.ref.path}
        return {
            "lora_name": name,
            "id": kept.ref.id,
            "rank": kept.ref.rank,
            "lora_id": number,
            "replaced": None if before is None else before.ref.id,
            "seconds": round(seconds, 3),
            "instances": 1 + self.tell_others(change),
        }

    def _checked(self, name: str, folder: Path, within: list[Path] | None) -> KeptAdapter:
        assert self._files is not None and self._ask_engine is not None
        try:
            kept = self._files.keep(name, folder, within)
            self._ask_engine(LoadAdapter(kept.ref)).result(_LOAD_SECONDS)
        except AdapterError as error:
            raise RequestError("INVALID_ARG", str(error)) from None
        except FutureTimeoutError:
            raise RequestError(
                "UNAVAILABLE", f"adapter {name!r}: the engine did not load it within {_LOAD_SECONDS:g} s"
            ) from None
        return kept

    def _unload(self, name: str) -> dict[str, Any]:
        removed = self.registry.remove(name)
        if removed is None:  # another request was first
            raise _not_found(name)
        self._log("info", f"adapter {name!r} ({removed.ref.id}) was unloaded")
        return {"lora_name": name, "id": removed.ref.id, "instances": 1 + self.tell_others({"unload": name})}

    # -- checks ----------------------------------------------------------------------------

    def _check_enabled(self) -> None:
        if not self.registry.enabled:
            raise RequestError("INVALID_ARG", "LoRA feature is not enabled.")

    def _check_free(self, name: str, in_place: bool) -> None:
        if not in_place and self.registry.get(name) is not None:
            raise RequestError(
                "INVALID_ARG",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )

    def _kept(self, name: str) -> KeptAdapter:
        found = self.registry.get(name)
        assert found is not None
        return found

    def _folder_of(self, name: str, path: str | None) -> Path:
        """The folder to load from; its files are checked when they are opened."""
        self._check_enabled()
        try:
            check_name(name, self._max_name_bytes, "lora_name")
        except ConfigError as error:
            raise RequestError("INVALID_ARG", str(error)) from None
        fixed = self._fixed.get(name)
        if path is None:
            if fixed is None:
                raise RequestError("INVALID_ARG", f"lora_path is missing: {shown(name)} is not in multi_lora.json")
            return fixed
        try:
            folder = Path(path).resolve() if Path(path).is_absolute() else None
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, or links in a circle
            raise RequestError("INVALID_ARG", f"lora_path={shown(path)}: {error}") from None
        if fixed is not None and folder == fixed.resolve():
            return fixed
        if folder is None or not any(folder.is_relative_to(allowed) for allowed in self._allowed):
            allowed = ", ".join(map(str, self._allowed)) or "none"
            raise RequestError(
                "INVALID_ARG",
                f"lora_path={shown(path)}: must be the absolute path of a folder in one of lora_allowed_paths of "
                f"model.json ({allowed})",
            )
        return folder


def _not_found(name: str) -> RequestError:
    return RequestError("INVALID_ARG", f"The lora adapter '{name[:200]}' cannot be found.")
