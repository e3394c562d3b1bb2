"""Request bodies for Anthropic's endpoints, from valid to absurd, and a check of the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hostile_bodies import _JUNK, _SCHEMA
from hypothesis import strategies as st

__all__ = ["anthropic_bodies", "check_anthropic_answer"]

_REFUSED = {400, 401, 404, 405, 408, 413, 415, 429, 529}

_TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})
_CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": True}}
_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "b"}
_BLOCK = (
    _TEXT
    | st.sampled_from([_CALL, _RESULT, {**_RESULT, "is_error": True, "content": None}])
    | st.sampled_from([{"type": "thinking", "thinking": "c", "signature": "d"}, {"type": "redacted_thinking"}])
    | st.sampled_from([{"type": "image"}, {"type": "document", "source": {}}, {"type": []}, {"type": "tool_use"}])
    | st.fixed_dictionaries({"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking"]), "text": _JUNK})
    | _JUNK.map(lambda junk: {**_RESULT, "content": junk})
    | _JUNK.map(lambda junk: {**_RESULT, "tool_use_id": junk})
)
_CONTENT = st.text(max_size=5) | st.lists(_BLOCK, max_size=3) | _JUNK
_ROLES = st.sampled_from(["user", "assistant", "system", "tool", None])
_MESSAGES = st.lists(st.fixed_dictionaries({"role": _ROLES, "content": _CONTENT}) | _JUNK, max_size=4)
_TOOL = {"name": "f", "input_schema": _SCHEMA}
_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "cache_control": st.just({"type": "ephemeral"}),
    "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": True}, {"messages": 1}]),
    "container": st.none() | st.just("c"),
    "context_management": st.sampled_from([{"edits": []}, None]),
    "messages": _MESSAGES,
    "metadata": st.fixed_dictionaries({"user_id": st.text(max_size=5) | _JUNK}),
    "model": st.sampled_from(["demo", "claude-opus", "", "../demo"]),
    "output_config": st.sampled_from(
        [{"effort": "high"}, {"effort": 3}, {"format": {"type": "json_schema", "schema": _SCHEMA}}, {"format": {}}]
    ),
    "seed": st.integers(-(2**64), 2**64),
    "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "system": st.text(max_size=5) | st.lists(_BLOCK, max_size=2),
    "temperature": st.floats(-1, 3),
    "thinking": st.sampled_from(
        [{"type": "enabled", "budget_tokens": 5}, {"type": "adaptive", "display": "omitted"}, {"type": []}, {}]
    ),
    "tool_choice": st.sampled_from(["auto", "any", "none", "tool", []]).map(lambda kind: {"type": kind, "name": "f"})
    | st.sampled_from([{"type": "tool"}, {}, "any"]),
    "tools": st.just([_TOOL])
    | st.just([{**_TOOL, "strict": True}, {"type": "web_search_20250305", "name": "w"}])
    | st.lists(_JUNK, max_size=2)
    | _JUNK.map(lambda value: [{"name": value, "input_schema": value, "type": value}]),
    "top_k": st.integers(-1, 9),
    "top_p": st.floats(0, 1),
}


@st.composite
def anthropic_bodies(draw: st.DrawFn) -> Any:
    """A body: a valid one with up to four changes, or anything.  It requests at most two tokens."""
    if draw(st.integers(0, 9)) == 0:
        return draw(_JUNK)
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    for name in draw(st.lists(st.sampled_from(sorted(_KEYS)), max_size=4, unique=True)):
        body[name] = draw(_KEYS[name] | _JUNK if draw(st.integers(0, 3)) == 0 else _KEYS[name])
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=8))] = draw(_JUNK)
    return body | {"max_tokens": draw(st.integers(0, 2))}


def check_anthropic_answer(response: httpx.Response) -> None:
    """Fail unless it is a complete answer, or an error in Anthropic's format that is not the server's fault."""
    assert response.headers["request-id"] == response.headers["x-request-id"]
    if response.status_code != 200:
        assert response.status_code in _REFUSED, (response.status_code, response.text)
        error = response.json()
        assert error["type"] == "error" and error["request_id"] and error["error"]["message"], error
        assert error["error"]["type"].endswith("_error"), error
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(event.partition("\ndata: ")[2]) for event in response.text.strip().split("\n\n")]
        kinds = [event["type"] for event in events]
        assert kinds.count("message_start") == kinds.count("message_delta") == 1 and "error" not in kinds, kinds
        assert kinds[-1] == "message_stop" and kinds.count("content_block_start") == kinds.count("content_block_stop")
    elif "content" in (answer := response.json()):
        assert answer["stop_reason"] and answer["content"], answer
    else:
        assert set(answer) == {"input_tokens"}, answer
