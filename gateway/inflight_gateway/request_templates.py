"""Chat templates that requests bring.

A template is a program: the backend renders it in the sandbox and within the limits of the model's own template, in
another process.  Both the gateway's operator and the model's must allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inflight_gateway.default_tools import takes_system_messages
from inflight_gateway.errors import invalid
from inflight_gateway.options import GatewayOptions

if TYPE_CHECKING:
    from inflight_gateway.upstream import AnyUpstream, ServedModel

__all__ = ["TEMPLATE_KEYS", "RequestTemplate", "check_request_template"]

# Keys of a request that only its template reads.
TEMPLATE_KEYS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "chat_template")


def check_request_template(options: GatewayOptions, template: str | None) -> None:
    """Raise APIError if a request brings a template, and the operator does not allow it."""
    if template is not None and not options.trust_request_chat_template:
        raise invalid(
            "chat_template: this gateway takes no templates from requests (--trust-request-chat-template); leave it "
            "out",
            "chat_template",
            "unsupported_parameter",
        )


@dataclass(frozen=True)
class RequestTemplate:
    """The template of a request.

    Attributes:
        text: Jinja source; None: the model's template renders the request.
        info: facts about the model.
    """

    text: str | None
    info: Mapping[str, Any]

    @property
    def takes_tools(self) -> bool:
        """Whether it mentions tools."""
        return bool(self.info.get("takes_tools", True)) if self.text is None else "tools" in self.text

    async def takes_system_messages(self, upstream: AnyUpstream, model: ServedModel) -> bool:
        """Whether it renders system messages; a request's template is believed to, and refuses them itself."""
        return True if self.text is not None else await takes_system_messages(upstream, model)
