"""Instances of a model that share an engine process load and unload the same adapters.  No torch, no Triton.

Triton gives a `control` request to one of them.  That one does it, tells the others, and answers once they have
followed: each from the copy of the first one, whose content has a name of its own.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

__all__ = ["AdapterPeers"]

_SECONDS = 10.0  # for the others to follow


class AdapterPeers:
    """This instance's part of it.

    Args:
        follow: does what another instance has done; returns whether that worked.
        tell: sends a text to all other instances.
        num_others: how many there are.
    """

    def __init__(
        self,
        follow: Callable[[Mapping[str, Any]], bool],
        tell: Callable[[str], None],
        num_others: int,
        seconds: float = _SECONDS,
    ) -> None:
        self._follow = follow
        self._tell = tell
        self._num_others = num_others
        self._seconds = seconds
        self._done: Counter[str] = Counter()
        self._changed = threading.Condition()  # guards the one above
        self._work: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="adapter-peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def tell(self, change: Mapping[str, Any]) -> int:
        """Have the others follow, and return how many have; waits for them, but not for long."""
        key = secrets.token_hex(8)
        with self._changed:
            self._done[key] = 0
            self._tell(json.dumps({"key": key, **change}))
            self._changed.wait_for(lambda: self._done[key] >= self._num_others, self._seconds)
            return self._done.pop(key)

    def told(self, text: str) -> None:
        """A message of another instance; does not block."""
        message = json.loads(text)
        if "done" in message:
            with self._changed:
                if message["done"] in self._done:
                    self._done[message["done"]] += 1
                    self._changed.notify_all()
        else:
            self._work.put(message)

    def _loop(self) -> None:
        while (message := self._work.get()) is not None:
            key = message.pop("key")
            if self._follow(message):
                self._tell(json.dumps({"done": key}))
