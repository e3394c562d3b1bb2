"""The adapters of a model by name and by number.  No torch, no Triton."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.errors import RequestError, shown

__all__ = ["AdapterRegistry"]

_MAX_LISTED = 100  # names in an error


class AdapterRegistry:
    """Names that requests can choose.  Any thread can call any method.

    A name keeps its number while it is loaded, and one of multi_lora.json for good.

    Args:
        enabled: `enable_lora` of model.json.
        fixed: the names of multi_lora.json, which have the numbers from 1 on.
    """

    def __init__(self, enabled: bool, fixed: Mapping[str, str] | None = None) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()  # guards the next three
        self._adapters: dict[str, KeptAdapter] = {}
        self._fixed = {name: number for number, name in enumerate(fixed or {}, 1)}
        self._numbers: dict[str, int] = {}
        self._next = len(self._fixed) + 1

    def chosen(self, name: str | None, number: int | None) -> KeptAdapter | None:
        """The adapter of a request; None if it asks for none.

        Raises:
            RequestError: INVALID_ARG; there is no such adapter, in vllm_backend's words where it has some.
        """
        if name is None and number is None:
            return None
        if not self.enabled:
            raise RequestError("INVALID_ARG", "LoRA feature is not enabled.")
        with self._lock:
            numbers = {} if number is None else {self._numbers[known]: known for known in self._adapters}
            wanted = name if number is None or name is not None else numbers.get(number)
            found = None if wanted is None else self._adapters.get(wanted)
            names = list(self._adapters) if found is None else []
        if name is not None and found is None:
            raise RequestError("INVALID_ARG", f"LoRA {name} is not supported, we currently support {_listed(names)}")
        if number is not None and (found is None or numbers.get(number) != found.ref.name):
            raise RequestError("INVALID_ARG", _wrong_number(name, number, numbers))
        return found

    def get(self, name: str) -> KeptAdapter | None:
        with self._lock:
            return self._adapters.get(name)

    def put(self, adapter: KeptAdapter) -> int:
        """Give the adapter its name, which another one may have had; returns its number."""
        name = adapter.ref.name
        with self._lock:
            if name not in self._adapters:
                number = self._fixed.get(name)
                if number is None:
                    number, self._next = self._next, self._next + 1
                self._numbers[name] = number
            self._adapters[name] = adapter
            return self._numbers[name]

    def remove(self, name: str) -> KeptAdapter | None:
        """Take the name away: open requests keep their adapter.  None if there is none."""
        with self._lock:
            self._numbers.pop(name, None)
            return self._adapters.pop(name, None)

    def ids(self) -> dict[str, str]:
        """Name -> id of the content."""
        with self._lock:
            return {name: adapter.ref.id for name, adapter in self._adapters.items()}


def _listed(names: list[str]) -> str:
    """As Python writes a list; the rest is counted if it is long."""
    if len(names) <= _MAX_LISTED:
        return str(names)
    return f"{names[:_MAX_LISTED]} and {len(names) - _MAX_LISTED} more"


def _wrong_number(name: str | None, number: int, numbers: dict[int, str]) -> str:
    if name is not None and number in numbers:
        return f"lora_task_id={number} is {shown(numbers[number])}, and lora_name={shown(name)}: give one of them"
    pairs = [f"{one} ({known[:100]})" for one, known in sorted(numbers.items())[:_MAX_LISTED]]
    has = ", ".join(pairs) or "none"
    return f"lora_task_id={number}: no adapter has this number; there are {has}, in the order of multi_lora.json"
