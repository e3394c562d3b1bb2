"""A server with OpenAI's streaming API over plain HTTP, whose whims a test chooses."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["OpenAIServer", "serving_openai"]


@dataclass
class OpenAIServer:
    """The behaviour of the server.

    Attributes:
        models: their names.
        adapters: names of LoRA adapters of the first one.
        usage: "each" response has it, the "end", or "none".
        refused: keys of a body (or of its `stream_options`) that it answers with 400, naming the first of them.
        tokens: of each answer; None: as many as requested.
        chat_only: there is no `/v1/completions`.
        text_only: prompts must be text.
        key: the API key that requests must have.
        statuses: instead of an answer to the next requests for one; a status, or "cut" for a stream without its end.
        bodies: of the requests that were answered.
        tokens_per_event: of its responses.
        hides_first: the first response has a token, but no text.
    """

    models: tuple[str, ...] = ("demo",)
    adapters: tuple[str, ...] = ()
    usage: str = "each"
    refused: tuple[str, ...] = ()
    tokens: int | None = None
    chat_only: bool = False
    text_only: bool = False
    key: str = ""
    statuses: list[int | str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_event: int = 1
    hides_first: bool = False
    url: str = ""

    def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, str] | None:
        """Status and message for a request that it does not answer."""
        if self.chat_only and path.endswith("/completions") and "chat" not in path:
            return 404, "Not Found"
        if self.text_only and isinstance(body.get("prompt"), list):
            return 400, "prompt must be a string"
        if body["model"] not in (*self.models, *self.adapters):
            return 404, f"The model `{body['model']}` does not exist."
        options = body.get("stream_options") or {}
        if named := [key for key in self.refused if key in body or key in options]:
            return 400, f"Unrecognized request argument supplied: {named[0]}"
        if self.statuses and isinstance(self.statuses[0], int):
            return self.statuses.pop(0), "as the test says"  # type: ignore[return-value]
        return None

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of an answer."""
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        count = wanted if self.tokens is None else min(wanted, self.tokens)
        events: list[dict[str, Any]] = []
        for done in range(self.tokens_per_event, count + self.tokens_per_event, self.tokens_per_event):
            done = min(done, count)
            reason = None if done < count else "length" if count == wanted else "stop"
            word = "" if self.hides_first and not events else "word "
            text = {"delta": {"content": word}} if "chat" in path else {"text": word}
            events.append({"choices": [{**text, "index": 0, "finish_reason": reason}]})
            if self.usage == "each":
                events[-1]["usage"] = {"completion_tokens": done}
        if self.usage == "end" and "stream_options" in body:
            events.append({"choices": [], "usage": {"completion_tokens": count}})
        return events


@contextlib.contextmanager
def serving_openai(**whims: Any) -> Iterator[OpenAIServer]:
    """The server, at its `url`, while the context is open."""
    whim = OpenAIServer(**whims)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._may_enter():
                found = self.path == "/v1/models"
                cards: list[dict[str, Any]] = [{"id": name, "parent": None} for name in whim.models]
                cards += [{"id": name, "parent": whim.models[0]} for name in whim.adapters]
                self._say(200 if found else 404, json.dumps({"data": cards}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._may_enter():
                return
            if refusal := whim.refusal(self.path, body):
                self._say(refusal[0], json.dumps({"error": {"message": refusal[1]}}).encode())
                return
            whim.bodies.append(body)
            lines = [b"data: " + json.dumps(event).encode() for event in whim.events(self.path, body)]
            if whim.statuses and whim.statuses.pop(0) == "cut":
                lines = lines[: len(lines) // 2]
            else:
                lines.append(b"data: [DONE]")
            self._say(200, b"".join(line + b"\n\n" for line in lines))

        def _may_enter(self) -> bool:
            if whim.key and self.headers["Authorization"] != f"Bearer {whim.key}":
                self._say(401, b'{"error": {"message": "a key, please"}}')
                return False
            return True

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        whim.url = f"http://127.0.0.1:{server.server_port}"
        yield whim
        server.shutdown()
