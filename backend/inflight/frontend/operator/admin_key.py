"""Protects `control` requests by the admin key, if the server has one.

A `control` request arrives at Triton's inference endpoint, which is open to every client, and a web page can send one
without its reader's knowledge.  So the request itself contains the key, as the request parameter `admin_key`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.contract import WireRequest

__all__ = ["ENVIRONMENT", "AdminKey"]

ENVIRONMENT = "INFLIGHT_ADMIN_KEY"

_CHANGES = ("drain", "load_adapter", "unload_adapter")  # these need a key; the others change nothing
_OPEN = ("tokenize", "detokenize", "model", "tokenizer")  # these never need a key: a request for text reveals as much


class AdminKey:
    """The key that `control` requests must contain, except for questions about texts.

    Args:
        key: None for a server without one: it answers questions that change nothing, and refuses the others.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AdminKey:
        return cls(environment.get(ENVIRONMENT) or None)

    def check(self, wire: WireRequest) -> None:
        """Accept requests for text, and `control` requests with the key.

        Raises:
            RequestError: INVALID_ARG; the key is missing or wrong, or the server has none and the request needs one.
        """
        control = wire.parameters.get("control")
        if control is None or control in _OPEN:
            return
        if self._key is None:
            if control in _CHANGES:
                raise RequestError(
                    "INVALID_ARG",
                    f"control={shown(control)}: this server has no admin key, so it refuses this; "
                    f"set {ENVIRONMENT} in its environment",
                )
            return
        given = wire.parameters.get("admin_key")
        if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), self._key.encode()):
            what = "is missing" if given is None else "is wrong"
            raise RequestError(
                "INVALID_ARG",
                f"control={shown(control)}: the admin key {what}; send what the server printed at its start "
                "as the request parameter admin_key",
            )
