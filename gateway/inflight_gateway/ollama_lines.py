"""The lines of Ollama's answers: JSON objects, one for each piece of an answer and one at the end."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

from inflight_client import Choice, ChoiceDelta, GenerationResult, StreamChunk
from inflight_gateway.answers import AnswerEvent, AnswerParser, Reasoning
from inflight_gateway.chat_logprobs import chat_logprobs
from inflight_gateway.errors import APIError
from inflight_gateway.sse import encode_json
from inflight_gateway.tool_parsers import CallArguments, CallEnd, CallStart, Content

__all__ = ["OllamaLines", "Shape", "chat_shape", "generate_shape", "now"]

# Text, reasoning and calls of a piece -> the keys of a line.
Shape = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]


def chat_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """`/api/chat`: a message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """`/api/generate`: a text."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")


class OllamaLines:
    """Encodes the answer of one request, whole or as a stream.

    Durations are measured here: `prompt_eval_duration` lasts from sending the request to its first token, so it
    includes waiting in the model's queue, and `eval_duration` from there to the last token.  `load_duration` is the
    time before the request was sent: models are loaded already.

    Args:
        model: the name in the request.
        shape: of the endpoint.
        parser: of the answer.
        show_reasoning: whether the caller gets the reasoning.
        top_logprobs: candidates per token; None: no log probabilities.
        arrived: when the request came, of `time.perf_counter`.
    """

    def __init__(
        self,
        model: str,
        shape: Shape,
        parser: AnswerParser,
        show_reasoning: bool,
        top_logprobs: int | None,
        arrived: float,
    ) -> None:
        self._model = model
        self._shape = shape
        self._parser = parser
        self._show_reasoning = show_reasoning
        self._top = top_logprobs
        self._arrived = arrived
        self._sent = time.perf_counter()
        self._call: tuple[int, str, str, list[str]] | None = None  # index, id, name and arguments of the open call
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not sent yet
        self._prompt_tokens = self._tokens = 0
        self._first: float | None = None
        self._last = 0.0
        self._reason = "stop"

    def keep_alive(self) -> bytes:
        """A line without text."""
        return self._line("", "", [])

    def begin(self) -> bytes:
        return b""

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        if chunk.num_input_tokens is not None:
            self._prompt_tokens = chunk.num_input_tokens
        delta = chunk.choices[0]
        if delta.num_tokens:
            self._first = chunk.elapsed if self._first is None else self._first
            self._last = chunk.elapsed
        return b"".join(self._line(*piece) for piece in self._pieces(delta))

    def end(self) -> bytes:
        value = {**self._head(), **self._shape("", "", []), **self._final()}
        if self._logprobs:  # of tokens without a text, such as the one that ended the answer
            value["logprobs"] = self._logprobs
        return self._encoded(value)

    def failed(self, error: APIError) -> bytes:
        return self._encoded({"error": error.message})

    def whole(self, result: GenerationResult) -> bytes:
        """The answer to a request that does not stream."""
        timings = result.timings
        self._prompt_tokens = result.usage.input_tokens or 0
        self._first, self._last = timings.ttft, timings.total
        choice = result.choices[0]
        choice.finish_reason = choice.finish_reason or "stop"
        pieces = self._pieces(choice)
        text = "".join(text for text, _, _ in pieces)
        thinking = "".join(thinking for _, thinking, _ in pieces)
        calls = [call for _, _, calls in pieces for call in calls]
        value = {**self._head(), **self._shape(text, thinking, calls), **self._final()}
        if self._top is not None:
            value["logprobs"] = self._logprobs
        return encode_json(value)

    def _pieces(self, delta: ChoiceDelta | Choice) -> list[tuple[str, str, list[dict[str, Any]]]]:
        """Text, reasoning and calls that are complete, in their order."""
        self._tokens += delta.num_tokens
        if self._top is not None and delta.logprobs:
            self._logprobs += chat_logprobs(delta.token_ids, delta.logprobs, self._top)
        found = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            found += self._parser.finish(delta.finish_reason)
        return [piece for one in found if (piece := self._piece(one)) is not None]

    def _piece(self, found: AnswerEvent) -> tuple[str, str, list[dict[str, Any]]] | None:
        if isinstance(found, Content):
            return found.text, "", []
        if isinstance(found, Reasoning):
            return ("", found.text, []) if self._show_reasoning else None
        if isinstance(found, CallStart):
            self._call = found.index, found.id, found.name, []
        elif isinstance(found, CallArguments) and self._call is not None:
            self._call[3].append(found.text)
        elif isinstance(found, CallEnd) and self._call is not None:
            call, self._call = self._call, None
            return _called(*call)
        return None

    def _line(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> bytes:
        value = {**self._head(), **self._shape(text, thinking, calls), "done": False}
        if self._logprobs:
            value["logprobs"], self._logprobs = self._logprobs, []
        return self._encoded(value)

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _final(self) -> dict[str, Any]:
        first = self._last if self._first is None else self._first
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(time.perf_counter() - self._arrived),
            "load_duration": _nanoseconds(self._sent - self._arrived),
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": self._tokens,
            "eval_duration": max(1, _nanoseconds(self._last - first)),  # clients divide by it
        }

    @staticmethod
    def _encoded(value: dict[str, Any]) -> bytes:
        return encode_json(value) + b"\n"


def _called(index: int, call_id: str, name: str, arguments: list[str]) -> tuple[str, str, list[dict[str, Any]]]:
    """A call.  Ollama's arguments are an object; the text of others, such as of a call that was cut off, is content."""
    text = "".join(arguments)
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return text, "", []
    return "", "", [{"id": call_id, "function": {"index": index, "name": name, "arguments": value}}]


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
