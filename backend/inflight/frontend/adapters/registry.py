"""The adapters of a model by name and by number.  No torch, no Triton."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import accumulate, islice

from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.errors import RequestError, shown

__all__ = ["AdapterRegistry"]

# Names in an error, and their letters in all, as ASCII: an error travels in the trailers of gRPC, which take 8 KiB.
_MAX_LISTED, _MAX_LETTERS = 100, 2000


class AdapterRegistry:
    """Names that requests can choose.  Any thread can call any method.

    A name keeps its number while it is loaded, and one of multi_lora.json for good.

    Args:
        enabled: `enable_lora` of model.json.
        fixed: the names of multi_lora.json, which have the numbers from 1 on.
    """

    def __init__(self, enabled: bool, fixed: Mapping[str, str] | None = None) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()  # guards all below but `_fixed`
        self._adapters: dict[str, KeptAdapter] = {}
        self._fixed = {name: number for number, name in enumerate(fixed or {}, 1)}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}  # by number; there can be 10,000
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
            numbered = None if number is None else self._names.get(number)
            wanted = numbered if name is None else name
            found = None if wanted is None else self._adapters.get(wanted)
            if name is not None and found is None:
                names = _listed([repr(known) for known in islice(self._adapters, _MAX_LISTED)])
                more = _more(len(self._adapters) - len(names))
                said = f"LoRA {name} is not supported, we currently support [{', '.join(names)}]{more}"
                raise RequestError("INVALID_ARG", said)
            if number is not None and (found is None or numbered != found.ref.name):
                raise RequestError("INVALID_ARG", self._wrong_number(name, number))
        return found

    def _wrong_number(self, name: str | None, number: int) -> str:
        if name is not None and number in self._names:
            given = shown(self._names[number])
            return f"lora_task_id={number} is {given}, and lora_name={shown(name)}: give one of them"
        first = sorted(islice(self._names.items(), _MAX_LISTED))
        pairs = _listed([f"{one} ({known[:100]})" for one, known in first])
        has = (", ".join(pairs) or "none") + _more(len(self._names) - len(pairs))
        return f"lora_task_id={number}: no adapter has this number; there are {has}, in the order of multi_lora.json"

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
                self._numbers[name], self._names[number] = number, name
            self._adapters[name] = adapter
            return self._numbers[name]

    def remove(self, name: str) -> KeptAdapter | None:
        """Take the name away: open requests keep their adapter.  None if there is none."""
        with self._lock:
            self._names.pop(self._numbers.pop(name, 0), None)
            return self._adapters.pop(name, None)

    def ids(self) -> dict[str, str]:
        """Name -> id of the content."""
        with self._lock:
            return {name: adapter.ref.id for name, adapter in self._adapters.items()}


def _listed(names: list[str]) -> list[str]:
    """As many of them as an error may have, at least one."""
    lengths = accumulate(len(ascii(name)) for name in names)
    return [name for place, (name, length) in enumerate(zip(names, lengths)) if not place or length <= _MAX_LETTERS]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""
