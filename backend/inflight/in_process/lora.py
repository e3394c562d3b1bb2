"""Adapters of in-process requests: `LoRARequest`, as vLLM's callers give it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from inflight.adapters.spec import CONFIG, WEIGHTS, describe_adapter
from inflight.config import EngineConfig
from inflight.engine.adapter import AdapterRef

__all__ = ["AdapterReader", "Adapters", "LoRARequest"]

_MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class LoRARequest:
    """An adapter in PEFT's format.

    Attributes:
        lora_name: for messages.
        lora_int_id: of vLLM's; it has no effect here: adapters with the same content are one.
        lora_path: folder with `adapter_config.json` and `adapter_model.safetensors`.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


# One for all prompts, or one for each; None: the checkpoint alone.
Adapters = Union[LoRARequest, Sequence[Union[LoRARequest, None]], None]

_Stat = tuple[tuple[int, int, int, int], ...]


class AdapterReader:
    """Finds what requests ask for; files that have not changed are read once."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: OrderedDict[str, tuple[_Stat, AdapterRef]] = OrderedDict()  # by path
        self._lock = threading.Lock()

    def refs(self, asked: Adapters, count: int) -> list[AdapterRef | None]:
        """The adapter of each of `count` prompts.

        Raises:
            ValueError: LoRA is off, or an adapter cannot be served.
        """
        if asked is None:
            return [None] * count
        requests = [asked] * count if isinstance(asked, LoRARequest) else list(asked)
        if len(requests) != count:
            raise ValueError(f"{count} prompts, but {len(requests)} lora_requests: give one for all or one per prompt")
        return [None if request is None else self._ref(request) for request in requests]

    def _ref(self, request: LoRARequest) -> AdapterRef:
        if not self._config.enable_lora:
            raise ValueError(f"lora_request {request.lora_name!r}: LoRA is off; make the LLM with enable_lora=True")
        if not request.lora_path:
            raise ValueError(f"lora_request {request.lora_name!r} has no lora_path: give the adapter's folder")
        path = os.path.realpath(request.lora_path)
        now = _stat(path)
        with self._lock:
            known = self._known.get(path)
        if known is None or known[0] != now:
            known = now, describe_adapter(path, request.lora_name, self._config.max_lora_rank)
            with self._lock:
                self._known[path] = known
                if len(self._known) > _MAX_REMEMBERED:
                    self._known.popitem(last=False)
        ref = known[1]
        return AdapterRef(request.lora_name, ref.id, ref.path, ref.rank)


def _stat(path: str) -> _Stat:
    """Of the adapter's files; () if one cannot be found, which reading it explains."""
    try:
        found = [os.stat(Path(path) / name) for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError):
        return ()
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found)
