"""The adapter that a request chooses, by name, by number, or by name and content.  No torch, no Triton types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.adapters.registry import AdapterRegistry
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.values import field_of, to_text

__all__ = ["chosen_adapter"]


def chosen_adapter(
    registry: AdapterRegistry,
    limits: Limits,
    name: str | None,
    number: int | None,
    fields: Mapping[str, Any],
) -> KeptAdapter | None:
    """The adapter of a request; None: it has none.

    Args:
        name, number: that the request gives.
        fields: `lora_digest`, if it is given, is the id of the content that the adapter must have: a stream that began
            on another server is continued with that content alone.

    Raises:
        RequestError: INVALID_ARG; there is no such adapter.
        LimitError: the name is too long.
    """
    if name is not None and registry.enabled:
        limits.check_name("lora_name", name)
    found = registry.chosen(name, number)
    digest = field_of(fields, "lora_digest", to_text, "the id of an adapter", "")
    if digest and (found is None or found.ref.id != digest):
        has = "the request names no adapter" if found is None else f"{shown(found.ref.name)} is {found.ref.id} here"
        raise RequestError(
            "INVALID_ARG",
            f"lora_digest={shown(digest)}: {has}, so its output cannot be continued; load the same adapter on all "
            "servers, or start the request anew",
        )
    return found
