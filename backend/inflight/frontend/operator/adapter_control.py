"""`control` requests that load and unload adapters.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from inflight.frontend.adapters.loader import AdapterLoader
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest, is_foreign
from inflight.frontend.request.values import field_of, to_bool, to_text

__all__ = ["adapter_controls"]

_COMMON = {"control", "admin_key", "lora_name"}


def adapter_controls(loader: AdapterLoader) -> dict[str, Callable[[WireRequest], Future[Any]]]:
    """The questions, and the functions that answer them.  These raise RequestError."""

    def load(wire: WireRequest) -> Future[Any]:
        name = _name(wire, {"lora_path", "load_inplace"})
        path = field_of(wire.parameters, "lora_path", to_text, "a folder", None)
        in_place = field_of(wire.parameters, "load_inplace", to_bool, "true or false", False)
        return loader.load(name, path, in_place)

    def unload(wire: WireRequest) -> Future[Any]:
        return loader.unload(_name(wire, set()))

    return {"load_adapter": load, "unload_adapter": unload}


def _name(wire: WireRequest, others: set[str]) -> str:
    for key in wire.parameters:
        if key not in _COMMON | others and not is_foreign(key):
            takes = ", ".join(sorted({"lora_name", *others}))
            raise RequestError("INVALID_ARG", f"{key[:100]}: this question takes the parameters {takes}; leave it out")
    name: str = field_of(wire.parameters, "lora_name", to_text, "the name of an adapter", "")
    if not name:
        raise RequestError("INVALID_ARG", "lora_name is missing: send it as a request parameter")
    return name
