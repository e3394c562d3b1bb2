"""A length limit beyond the context: the model ends there, and a header says so."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from inflight_gateway.errors import invalid
from inflight_gateway.response_headers import warn
from inflight_gateway.upstream import ServedModel

__all__ = ["LengthLimit", "check_ids"]

_MAX_TOKENS = 2**31 - 1
_MANY_IDS, _CONTEXTS = 1 << 17, 8


def check_ids(name: str, count: int, most: int | None, why: str) -> None:
    """Refuse so many token ids that their conversion would keep other requests waiting (0.1 us each).

    The model refuses what is beyond its context: what is known here of it can be older than its last start, or tell of
    another of several Tritons.

    Args:
        name: of the list, in the body.
        most: that the context takes, as far as known; None: unknown.
        why: `most` is the limit.
    """
    if most is not None and count > max(_MANY_IDS, _CONTEXTS * most):
        raise invalid(
            f"{name}: {count} token ids came; at most {most} are allowed ({why}), so send fewer, or set "
            "truncate_prompt_tokens",
            name.partition("[")[0],
        )


@dataclass(frozen=True)
class LengthLimit:
    """The limit that a request asks for.

    Attributes:
        key: of the body, for the message.
        tokens: its value; None: the request has no limit.
        context: tokens that a sequence can have, prompt included; None if unknown.
    """

    key: str
    tokens: int | None
    context: int | None

    @classmethod
    def of(cls, key: str, tokens: int | None, model: ServedModel) -> LengthLimit:
        """The limit of a request to a model; -1 means no limit."""
        return cls(key, None if tokens == -1 else tokens, model.info.get("max_model_len"))

    @staticmethod
    def longest(model: ServedModel) -> int:
        """The `max_tokens` for as many tokens as the context allows; the model ends a sequence there."""
        return model.info.get("max_model_len") or _MAX_TOKENS

    def check(self, scope: Scope, prompt_tokens: int) -> None:
        """Warn if the context ends earlier.

        Args:
            scope: of the request, whose response has not begun.
            prompt_tokens: of the longest prompt; 0 if unknown.
        """
        if self.tokens is None or self.context is None:
            return
        room = self.context - max(prompt_tokens, 1)
        if self.tokens > room:
            prompt = f"a prompt of {prompt_tokens}" if prompt_tokens else "the prompt"
            warn(
                scope,
                "max_tokens",
                f"{self.key}: {self.tokens} came; the context of {self.context} tokens "
                f"has room for {room} after {prompt}",
            )
