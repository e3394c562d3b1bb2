"""Parses one answer of a model incrementally: reasoning, then content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight_gateway.reasoning import ReasoningParser
from inflight_gateway.tool_parsers import CallArguments, CallStart, Content, Event, ToolParser

__all__ = ["Answer", "AnswerEvent", "AnswerParser", "Call", "Reasoning"]


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


AnswerEvent = Reasoning | Event


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The events of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class AnswerParser:
    """Parses one answer in pieces.

    Args:
        reasoning: splits off the reasoning; None for a model without reasoning.
        tools: parses tool calls; None if none are allowed.
        only_calls: apart from reasoning, the answer consists of calls.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, only_calls: bool = False) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._only_calls = only_calls
        self.calls = 0  # so far

    def feed(self, text: str) -> list[AnswerEvent]:
        """More text of the answer."""
        if self._reasoning is None:
            return self._rest(text)
        thought, text = self._reasoning.feed(text)
        return [*_thought(thought), *self._rest(text)]

    def finish(self, reason: str | None) -> list[AnswerEvent]:
        """The answer ended, with this finish reason."""
        events: list[AnswerEvent] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
            events += [*_thought(thought), *self._rest(text)]
        if self._tools is not None:
            events += self._counted(self._tools.finish(reason == "length"))
        if reason == "length" and self._only_calls:
            events = [event for event in events if not isinstance(event, Content)]  # of a call that has not begun
        return events

    def whole(self, text: str, reason: str | None) -> Answer:
        """The answer of a whole text that ended with `reason`; call it on a new parser."""
        answer = Answer()
        content: list[str] = []
        for event in [*self.feed(text), *self.finish(reason)]:
            if isinstance(event, Reasoning):
                answer.reasoning += event.text
            elif isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, CallStart):
                answer.calls.append(Call(event.id, event.name))
            elif isinstance(event, CallArguments):
                answer.calls[event.index].arguments += event.text
        answer.content = "".join(content)
        return answer

    def _rest(self, text: str) -> list[AnswerEvent]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._counted(self._tools.feed(text)) if text else []

    def _counted(self, events: list[Event]) -> list[AnswerEvent]:
        self.calls += sum(isinstance(event, CallStart) for event in events)
        return [*events]


def _thought(text: str) -> list[AnswerEvent]:
    return [Reasoning(text)] if text else []
