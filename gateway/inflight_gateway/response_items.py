"""The output of a response: its items, and the events about them."""

from __future__ import annotations

import secrets
from typing import Any

from inflight_gateway.answers import AnswerEvent, Reasoning
from inflight_gateway.tool_parsers import CallArguments, CallStart, Content

__all__ = ["ResponseItems"]

_Event = dict[str, Any]


class ResponseItems:
    """Builds items from the events of an answer: reasoning, messages and function calls, in the model's order.

    Its methods return events of OpenAI's types, without sequence numbers.

    Attributes:
        items: so far; the last one can be open.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""  # type of the open item
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, event: AnswerEvent, logprobs: list[dict[str, Any]]) -> list[_Event]:
        """Process an event of the answer; `logprobs` are those of its tokens, for a message's text."""
        if isinstance(event, CallStart):
            return [*self.close(), self._begin_call(event)]
        if isinstance(event, CallArguments):
            self._pieces.append(event.text)
            return [self._of("response.function_call_arguments.delta", delta=event.text)]
        if isinstance(event, Reasoning):
            return self._grow("reasoning", event.text, [])
        if isinstance(event, Content):
            return self._grow("message", event.text, logprobs)
        return self.close()

    def finish(self, complete: bool) -> list[_Event]:
        """The answer ended, complete or truncated.  An empty answer becomes an empty message."""
        found = [] if self.items else self._grow("message", "", [])
        return [*found, *self.close("completed" if complete else "incomplete")]

    def close(self, status: str = "completed") -> list[_Event]:
        """The open item is complete."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        done = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if kind == "function_call":
            item["arguments"] = text
            ends = [{"type": "response.function_call_arguments.done", **done, "arguments": text, "name": item["name"]}]
        else:
            item["content"] = [part] = [self._part(kind, text)]
            place = {**done, "content_index": 0}
            extra = {"logprobs": self._logprobs} if kind == "message" else {}
            name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            ends = [
                {"type": name, **place, "text": text, **extra},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        self._pieces, self._logprobs = [], []
        return [
            *ends,
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)},
        ]

    def _grow(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[_Event]:
        """Add text of a message or of reasoning."""
        found: list[_Event] = []
        if self._open != kind:
            found = [*self.close(), *self._begin(kind)]
        self._pieces.append(text)
        self._logprobs += logprobs
        if kind == "message":
            found.append(self._of("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        else:
            found.append(self._of("response.reasoning_text.delta", content_index=0, delta=text))
        return found

    def _begin(self, kind: str) -> list[_Event]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{secrets.token_hex(16)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(16)}", "summary": []}
        part = self._part(kind, "")
        return [self._added(kind, item), self._of("response.content_part.added", content_index=0, part=part)]

    def _begin_call(self, event: CallStart) -> _Event:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}", "call_id": event.id}
        return self._added("function_call", {**item, "name": event.name, "arguments": "", "status": "in_progress"})

    def _added(self, kind: str, item: dict[str, Any]) -> _Event:
        self._open = kind
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _of(self, name: str, **values: Any) -> _Event:
        """An event about the open item."""
        return {"type": name, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}
