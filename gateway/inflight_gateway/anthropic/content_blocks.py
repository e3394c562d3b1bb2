"""The content of a message: its blocks, and the events about them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from inflight_gateway.answers import AnswerEvent, Reasoning
from inflight_gateway.tool_parsers import CallArguments, CallStart, Content

__all__ = ["ContentBlocks"]

_Event = dict[str, Any]


class ContentBlocks:
    """Builds blocks from the events of an answer: thinking, text and tool_use, in the model's order.

    Its methods return Anthropic's events.

    Args:
        show_thinking: whether reasoning becomes blocks; else it is left out.

    Attributes:
        blocks: so far; the last one can be open, and is then incomplete.
    """

    def __init__(self, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self.blocks: list[dict[str, Any]] = []
        self._open = ""  # type of the open block
        self._pieces: list[str] = []

    def add(self, event: AnswerEvent) -> list[_Event]:
        """Process an event of the answer."""
        if isinstance(event, Content):
            return self._grow("text", {"type": "text_delta", "text": event.text}, event.text)
        if isinstance(event, Reasoning):
            if not self._show_thinking:
                return []
            return self._grow("thinking", {"type": "thinking_delta", "thinking": event.text}, event.text)
        if isinstance(event, CallStart):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return [*self._close(), self._begin(block)]
        if isinstance(event, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text}, event.text)]
        return self._close()

    def finish(self) -> list[_Event]:
        """The answer ended.  One without blocks becomes an empty text: clients read the first block."""
        found = [] if self.blocks else [self._begin({"type": "text", "text": ""})]
        return [*found, *self._close()]

    def _grow(self, kind: str, delta: dict[str, Any], text: str) -> list[_Event]:
        found: list[_Event] = []
        if self._open != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            found = [*self._close(), self._begin(block)]
        return [*found, self._delta(delta, text)]

    def _begin(self, block: dict[str, Any]) -> _Event:
        self._open = block["type"]
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any], text: str) -> _Event:
        self._pieces.append(text)
        return self._event(delta)

    def _event(self, delta: dict[str, Any]) -> _Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[_Event]:
        """The open block is complete."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        text, self._pieces = "".join(self._pieces), []
        block, events = self.blocks[-1], []
        if kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = _signature(text)
            events.append(self._event({"type": "signature_delta", "signature": block["signature"]}))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; {} if the model did not write a whole object."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(thinking: str) -> str:
    """Some clients send back only thinking that is signed.  Nothing checks it: a conversation is the client's own."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).digest()).decode()
