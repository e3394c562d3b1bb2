"""Streams completions or chats from any server with OpenAI's API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from loadtest.errors import LoadTestError
from loadtest.exchange import Exchange, Failure, no_model, unreachable
from loadtest.http_client import HttpClient, HttpFailure

__all__ = ["KEY_VARIABLE", "OpenAIClient"]

KEY_VARIABLE = "OPENAI_API_KEY"

_COMPLETIONS, _CHAT = "/completions", "/chat/completions"
# Keys that some servers refuse, in the order in which they are left out if a refusal names none of them.
_OPTIONAL = ("ignore_eos", "continuous_usage_stats", "stream_options", "temperature", "max_tokens")
_PROBE_IDS = [500, 501, 502, 503]
_PROBE_TEXT = "one two three four"


class OpenAIClient(HttpClient):
    """`/v1/completions`, or `/v1/chat/completions` of a server that has only chats.

    Args:
        address: of the server, or of its API: `http://HOST:9000/v1`.
        api_key: by default the environment variable OPENAI_API_KEY.
        traits: see `LoadClient`: `path`, whether prompts can be `ids`, and the keys to leave out (`without`).
    """

    def __init__(
        self, address: str, model: str, api_key: str | None = None, traits: dict[str, Any] | None = None
    ) -> None:
        super().__init__(address, model)
        self._base = self._base or "/v1"
        self._key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        self.traits = traits or {"path": _COMPLETIONS, "ids": True, "without": []}

    @property
    def takes_ids(self) -> bool:
        return bool(self.traits["ids"])

    def models(self) -> list[str]:
        """The names of the models, without their LoRA adapters.

        Raises:
            LoadTestError: no server, or it gives no list.
        """
        parents = self._parents()
        return [name for name, parent in parents.items() if parent not in parents]

    def _parents(self) -> dict[str, str | None]:
        """Of each model and adapter, the model that it is an adapter of; None: the server says nothing of that."""
        status, answer = self._ask("/models")  # a router in front of gateways has no page for each model
        if status in (401, 403):
            raise self._unauthorised(status)
        try:
            if status != 200:
                raise ValueError(f"{status}: {answer.decode(errors='replace').strip()}")
            return {str(card["id"]): card.get("parent") for card in json.loads(answer)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreachable(self._address, "HTTP", f"{self._base}/models: {error}") from None

    def check(self) -> None:
        if self._model not in self._parents():
            raise no_model(self._model, self._address)
        for path, ids in ((_COMPLETIONS, True), (_COMPLETIONS, False), (_CHAT, False)):
            self.traits = {"path": path, "ids": ids, "without": []}
            refusal = self._without_refused_keys()
            if refusal is None:
                return
        raise LoadTestError(f"{self._address} refuses streams of {self._model}: {refusal}")

    def check_adapter(self, name: str) -> None:
        parent = self._parents().get(name)
        if parent not in (None, self._model):
            raise LoadTestError(f"--adapters: {name!r} is an adapter of {parent!r}, not of {self._model!r}")

    def _without_refused_keys(self) -> HttpFailure | None:
        """Leave out the keys that the server refuses; returns its refusal of the rest."""
        without: list[str] = self.traits["without"]
        while (refusal := self._probe()) is not None:
            left = [key for key in _OPTIONAL if key not in without]
            if not left or refusal.status in (404, 405):
                return refusal
            without.append(next((key for key in left if key in refusal.detail), left[0]))
        return None

    def _probe(self) -> HttpFailure | None:
        body = self._body(_PROBE_IDS if self.traits["ids"] else _PROBE_TEXT, 1)
        status, answer = self._ask(self.traits["path"], body)
        if status == 200:
            return None
        refusal = HttpFailure(status, answer.decode(errors="replace").strip())
        if status in (401, 403):
            raise self._unauthorised(status)
        if status == 429 or status >= 500:
            raise LoadTestError(f"{self._address} answers a request to {self._model} with {refusal}")
        return refusal

    def _unauthorised(self, status: int) -> LoadTestError:
        asked = f"refuses the API key ({status})" if self._key else "asks for an API key"
        return LoadTestError(f"{self._address} {asked}; set the environment variable {KEY_VARIABLE}, or --api-key")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _body(self, prompt: list[int] | str, max_tokens: int, adapter: str = "") -> dict[str, Any]:
        body: dict[str, Any] = {"model": adapter or self._model, "stream": True}
        if self.traits["path"] == _CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        options = {"include_usage": True, "continuous_usage_stats": True}
        extra = {"ignore_eos": True, "stream_options": options, "temperature": 0.0, "max_tokens": max_tokens}
        without = self.traits["without"]
        if "continuous_usage_stats" in without:
            del options["continuous_usage_stats"]
        if "max_tokens" in without:
            body["max_completion_tokens"] = max_tokens
        return {**body, **{key: value for key, value in extra.items() if key not in without}}

    def _may_leave(self, exchange: Exchange, max_tokens: int) -> bool:
        return False  # the end of the stream says whether the answer is complete

    def _responses(self, prompt: list[int] | str, max_tokens: int, adapter: str, exchange: Exchange) -> Iterator[int]:
        exchange.counted = ""
        total = 0
        for event in self._events(self.traits["path"], self._body(prompt, max_tokens, adapter), needs_done=True):
            has_text, finish_reason, tokens = _parts(event)
            if finish_reason:
                exchange.ended_early = finish_reason != "length"
            if not exchange.counted:  # a token can come without text: the beginning of a character
                exchange.counted = "server" if tokens else "chunks" if has_text else ""
            before, total = total, max(total, tokens or 0)
            yield total - before if exchange.counted == "server" else int(has_text)
        if exchange.counted == "chunks" and total:
            exchange.counted = "usage"
            exchange.count_as(total)
        exchange.ended_early = exchange.ended_early and exchange.tokens < max_tokens


def _parts(event: dict[str, Any]) -> tuple[bool, str | None, int | None]:
    """Whether an event has text, why the answer ends with it, and the number of tokens until then, if it says so."""
    try:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        has_text = bool(choice.get("text")) or any(delta.get(key) for key in _DELTA_TEXTS)
        usage = event.get("usage")
        return has_text, choice.get("finish_reason"), int(usage["completion_tokens"]) if usage else None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise Failure("an event of an unknown form", json.dumps(event)) from None


_DELTA_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
