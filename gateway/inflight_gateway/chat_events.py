"""The event stream of a chat."""

from __future__ import annotations

from typing import Any

from inflight_client import ChoiceDelta, StreamChunk
from inflight_gateway.answers import AnswerEvent, AnswerParser, Reasoning
from inflight_gateway.chat_logprobs import chat_logprobs
from inflight_gateway.chat_plan import ChatBody, ChatPlan
from inflight_gateway.errors import APIError
from inflight_gateway.generation import failed_events
from inflight_gateway.sse import DONE, EventTemplate, event
from inflight_gateway.stop_reason import shown_stop_reason
from inflight_gateway.tool_parsers import CallArguments, CallStart, Content
from inflight_gateway.usage import UsageCounter

__all__ = ["ChatEvents", "finish_reason"]


def finish_reason(reason: str | None, called: bool, body: ChatBody) -> str | None:
    """OpenAI's finish reason: `tool_calls` or `function_call` for an answer that stopped by itself and called one."""
    if not called or reason != "stop":
        return reason
    return "tool_calls" if body.functions is None else "function_call"


class ChatEvents:
    """Encodes the stream of a chat.

    For each choice, the first chunk has the role, and the last one the finish reason.  The log probabilities and the id
    of a token are sent with the next chunk of its choice, because its text can be held back.

    Args:
        head: the common keys of all chunks.
        body: the request.
        plan: how to parse its answers.
    """

    def __init__(self, head: dict[str, Any], body: ChatBody, plan: ChatPlan) -> None:
        self._head = {**head, "usage": None} if body.include_usage else head
        self._body = body
        self._plan = plan
        self._usage = UsageCounter(reasoning=plan.reasoning_tokens())
        self._choices = [_Choice(index, plan.parser()) for index in range(body.n or 1)]
        self._plain = not (body.logprobs or body.return_token_ids or body.continuous_usage)

    def begin(self) -> bytes:
        values = [self._value(choice, {"role": "assistant", "content": ""}, None) for choice in self._choices]
        if self._plan.prompt_token_ids is not None:
            values[0]["prompt_token_ids"] = self._plan.prompt_token_ids
        if self._plan.echo:
            values += [self._value(choice, {"content": self._plan.echo}, None) for choice in self._choices]
        return b"".join(map(event, values))

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        self._usage.add(prompt, chunk)
        return b"".join([self._delta(delta) for delta in chunk.choices if delta.num_tokens or delta.finish_reason])

    def end(self) -> bytes:
        if self._body.include_usage:
            return event({**self._head, "choices": [], "usage": self._usage.usage()}) + DONE
        return DONE

    def failed(self, error: APIError) -> bytes:
        return failed_events(error)

    def _delta(self, delta: ChoiceDelta) -> bytes:
        choice = self._choices[delta.index]
        if not self._plain:
            self._hold(choice, delta)
        found = choice.parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            found += choice.parser.finish(delta.finish_reason)
        events = [self._of(choice, one) for one in found]
        if delta.finish_reason is not None:
            choice.stop_reason = shown_stop_reason(delta.stop_reason, self._body.stop_token_ids)
            events.append(
                self._event(choice, {}, finish_reason(delta.finish_reason, choice.parser.calls > 0, self._body))
            )
        return b"".join(events)

    def _hold(self, choice: _Choice, delta: ChoiceDelta) -> None:
        """Keep token ids and log probabilities until the next event is sent."""
        if self._body.return_token_ids:
            choice.token_ids += delta.token_ids
        if self._body.logprobs and delta.logprobs:
            choice.logprobs += chat_logprobs(
                delta.token_ids, delta.logprobs, self._body.top_logprobs or 0, self._body.ids_as_tokens
            )

    def _of(self, choice: _Choice, found: AnswerEvent) -> bytes:
        if isinstance(found, Content):
            return self._text(choice, found.text)
        if isinstance(found, Reasoning):
            both = {"reasoning_content": found.text, "reasoning": found.text}
            return self._event(choice, both) if self._plan.show_reasoning else b""
        if isinstance(found, CallStart):
            head = {"index": found.index, "id": found.id, "type": "function"}
            return self._call(choice, head, {"name": found.name, "arguments": ""})
        if isinstance(found, CallArguments):
            return self._call(choice, {"index": found.index}, {"arguments": found.text})
        return b""

    def _call(self, choice: _Choice, head: dict[str, Any], function: dict[str, Any]) -> bytes:
        """Part of a call; the legacy form has only one."""
        if self._body.functions is None:
            return self._event(choice, {"tool_calls": [{**head, "function": function}]})
        return self._event(choice, {"function_call": function}) if head["index"] == 0 else b""

    def _text(self, choice: _Choice, text: str) -> bytes:
        if not self._plain:
            return self._event(choice, {"content": text})
        if choice.template is None:
            choice.template = EventTemplate(lambda hole: self._value(choice, {"content": hole}, None))
        return choice.template.fill(text)

    def _event(self, choice: _Choice, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return event(self._value(choice, delta, reason))

    def _value(self, choice: _Choice, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        logprobs = {"content": choice.logprobs, "refusal": None} if choice.logprobs else None
        sent: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            sent["stop_reason"] = choice.stop_reason
        if choice.token_ids:
            sent["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        value = {**self._head, "choices": [sent]}
        if self._body.continuous_usage:
            value["usage"] = self._usage.usage()
        return value


class _Choice:
    """The state of one of the n answers: `logprobs` and `token_ids` are not sent yet."""

    def __init__(self, index: int, parser: AnswerParser) -> None:
        self.index = index
        self.parser = parser
        self.template: EventTemplate | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
