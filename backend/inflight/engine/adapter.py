"""A LoRA adapter (arXiv:2106.09685), as requests name it: by its content.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import msgspec

__all__ = ["AdapterRef", "Adapters", "Leaving", "Outcome"]


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """Where an adapter lies, and which one it is.

    Attributes:
        name: as clients and messages call it; two names can be one adapter, and a name another one after a reload.
        id: 32 hexadecimal digits: BLAKE2b-128 of its configuration and weights.
        path: folder with `adapter_config.json` and `adapter_model.safetensors`, in PEFT's format, which never change.
        rank: the largest of its modules.
    """

    name: str
    id: str
    path: str
    rank: int


class Outcome(NamedTuple):
    """Whether a request may start with an adapter, or why it never can; neither ready nor a failure: it waits."""

    ready: bool
    failure: str = ""


Leaving = Callable[[Sequence[str], Any, bool], Sequence[str]]


class Adapters(Protocol):
    """The adapters in a runner's memory, as admission sees them; every call returns at once, in the engine's thread."""

    def reset(self, goes_before: Callable[[Any, Any], bool], leaving: Leaving) -> None:
        """A new engine core: it has no requests.

        Args:
            goes_before: whether a request is admitted before another one.
            leaving: of ids in the order of their last use, the ones that may leave to make room for a request's
                adapter, in the order in which they leave; for None all.  If it is impatient, nearly all.
        """

    def load_of(self, ref: AdapterRef) -> Future[dict[str, Any]] | None:
        """Its load, which can be done; None: it is neither in memory nor on its way there."""

    def start(self, ref: AdapterRef, request: Any) -> None:
        """`request` with it has arrived: load it, if there is room; again, if that failed some seconds ago."""

    def outcome(self, ref: AdapterRef, request: Any, begun: bool) -> Outcome:
        """Whether `request`, which is next or was held, may start with it.  The first to ask or to go comes first.

        `begun`: it holds the adapter already, for another sequence or before it was preempted.
        """

    def hold(self, ref: AdapterRef) -> None:
        """A request begins to run with it, for which `outcome` was ready: it stays in memory until it is released."""

    def release(self, ref: AdapterRef) -> None:
        """A request that held it has ended."""

    def forget(self, ref: AdapterRef) -> None:
        """No request with it is left, or it could start now and waits for something else: none waits for it."""

    def step_done(self, seconds: float, num_running: int) -> None:
        """A step took so long, and so many requests go on: loads leave most of the next one's time to them."""

    def load(self, ref: AdapterRef) -> Future[dict[str, Any]]:
        """The answer to `LoadAdapter`.  The future raises ValueError if the adapter cannot be served."""
