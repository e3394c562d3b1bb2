"""KV belongs to the adapter that computed it.  No torch."""

from __future__ import annotations

from inflight.engine.attached import Attached

__all__ = ["AdapterSalt"]


class AdapterSalt:
    """A `RequestChoice`: requests share a prefix only with requests of the same adapter, by its content."""

    def attach(self, attached: Attached, num_prompt_tokens: int, max_tokens: int) -> Attached:
        return attached

    def salt(self, attached: Attached) -> str:
        return "" if attached.adapter is None else attached.adapter.id
