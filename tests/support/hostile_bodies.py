"""Request bodies for OpenAI's endpoints, from valid to absurd, and a check of the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import strategies as st

__all__ = ["bodies", "check_answer", "encoded"]

_REFUSED = {400, 401, 404, 405, 408, 413, 415, 429}

_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([2**31, 2**63, -(2**70), 1e300, -0.0, 0.5])
    | st.text(max_size=6)
    | st.sampled_from(["\ud800", "\x00", "auto", "required", "text", "<think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}
_PARTS = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x"}}, {"type": 3}, "b"]
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "developer", "tool", "function", "ghost", None])},
        optional={
            "content": st.text(max_size=5) | st.none() | st.lists(st.sampled_from(_PARTS), max_size=2) | _JUNK,
            "tool_calls": st.just([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}])
            | _JUNK,
            "tool_call_id": st.just("1") | _JUNK,
            "function_call": st.just({"name": "f", "arguments": "{}"}) | _JUNK,
        },
    )
    | _JUNK,
    max_size=3,
)
# Values that can be valid; any key can also get an absurd one.
_PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "messages": _MESSAGES,
    "input": st.text(max_size=9) | _MESSAGES,
    "instructions": st.text(max_size=5),
    "text": st.sampled_from([{"format": {"type": "json_object"}}, {"format": {"type": "json_schema"}}, {}]),
    "reasoning": st.sampled_from([{"effort": "low"}, {"effort": 3}]),
    "include": st.lists(st.sampled_from(["message.output_text.logprobs", "file_search_call.results"]), max_size=2),
    "prompt": st.text(max_size=9)
    | st.lists(st.integers(0, 2600), max_size=4)
    | st.lists(st.text(max_size=5), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.sampled_from(
        [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    ),
    "n": st.integers(1, 3),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 9),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "seed": st.integers(-(2**64), 2**64),
    "logit_bias": st.dictionaries(st.sampled_from(["5", "-1", "x", "99999999"]), st.floats(-100, 100), max_size=2),
    "logprobs": st.booleans() | st.integers(-1, 3),
    "top_logprobs": st.integers(-1, 3),
    "prompt_logprobs": st.integers(-1, 3),
    "echo": st.booleans(),
    "tools": st.just([_TOOL])
    | st.lists(_JUNK, max_size=2)
    | _JUNK.map(lambda value: [{"type": "function", "function": {"name": "f", "parameters": value}}]),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}},
            {"type": "json_schema"},
        ]
    ),
    "structured_outputs": st.sampled_from([{"regex": "a|b"}, {"choice": ["x", "y"]}, {"regex": "("}, {"grammar": "?"}]),
    "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": False}, {"messages": 1}, {"x": {"y": []}}]),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 5),
    "min_tokens": st.integers(-1, 2),
    "stop_token_ids": st.lists(st.integers(-1, 3000), max_size=2),
    "bad_words": st.lists(st.text(max_size=3), max_size=2),
    "allowed_token_ids": st.lists(st.integers(-1, 3000), max_size=2),
    "request_id": st.text(max_size=5),
    "return_token_ids": st.booleans(),
    "user": st.text(max_size=5),
    "functions": st.just([{"name": "f", "parameters": _SCHEMA}]) | st.lists(_JUNK, max_size=2),
    "function_call": st.sampled_from(["auto", "none", {"name": "f"}, {"name": "g"}]),
    "think": st.booleans() | st.sampled_from(["low", "x"]),
    "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"type": []}]),
    "guided_json": st.just(_SCHEMA),
    "guided_choice": st.lists(st.text(max_size=3), max_size=2),
    "best_of": st.integers(1, 2),
    "num_ctx": st.integers(0, 9),
    "store": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "suffix": st.text(max_size=5),
    "format": st.sampled_from(["", "json", "xml", _SCHEMA, {"type": "nothing"}]),
    "options": st.fixed_dictionaries(
        {"num_predict": st.integers(1, 2)},
        optional={
            "temperature": st.floats(-1, 3) | _JUNK,
            "seed": st.integers(-2, 2**64),
            "stop": st.text(max_size=3) | _JUNK,
            "mirostat": st.integers(0, 1),
            "repeat_penalty": st.floats(-1, 2),
            "num_ctx": _JUNK,
            "num_gpu": _JUNK,
        },
    ),
    "raw": st.booleans(),
    "system": st.text(max_size=5),
    "images": st.lists(_JUNK, max_size=1),
    "dimensions": st.integers(-1, 5),
    "encoding_format": st.sampled_from(["float", "base64", "bytes"]),
    "truncation_side": st.sampled_from(["left", "right", "up"]),
    "use_activation": st.booleans(),
    "normalize": st.booleans(),
    "softmax": st.booleans(),
    "instruction": st.text(max_size=5),
    "top_n": st.integers(-1, 3),
    "return_documents": st.booleans(),
    "max_tokens_per_doc": st.integers(-1, 3),
    "data_1": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "queries": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "items": st.lists(st.text(max_size=3), max_size=6),
    "model": st.sampled_from(["demo", "demo:latest", "gpt-4", "", "../demo"]),
}


_LIMITS = ("max_tokens", "max_output_tokens")
# Keys that one endpoint always accepts, and others do not.
_HI = [{"role": "user", "content": "Hi"}]
_OWN: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": _HI, "max_tokens": 2},
    "/invocations": {"messages": _HI, "max_tokens": 2},
    "/api/chat": {"model": "demo", "messages": _HI, "options": {"num_predict": 2}},
    "/api/generate": {"model": "demo", "prompt": "Return", "options": {"num_predict": 2}},
    "/api/show": {"model": "demo"},
    "/responses": {"input": "Hi", "max_output_tokens": 2},
    "/completions": {"prompt": "Return", "max_tokens": 2},
    "/detokenize": {"tokens": [5, 6]},
    "/tokenize": {"prompt": "Return"},
    "/embeddings": {"input": ["Return", [5, 6]]},
    "/score": {"text_1": "Return", "text_2": ["the", "number"]},
    "/rerank": {"query": "Return", "documents": ["the", {"text": "number"}]},
    "/classify": {"input": "Return"},
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A body for an endpoint: a valid one with up to four changes, or anything.  It requests at most two tokens."""
    if draw(st.integers(0, 9)) == 0:
        return draw(_JUNK)
    mine = next(keys for end, keys in _OWN.items() if path.endswith(end))
    others = {key for keys in _OWN.values() for key in keys} - mine.keys()
    names = [name for name in _PLAUSIBLE if name not in others]
    body = dict(mine)
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        body[name] = draw(_PLAUSIBLE[name] | _JUNK if draw(st.integers(0, 3)) == 0 else _PLAUSIBLE[name])
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=8))] = draw(_JUNK)
    return body | {name: draw(st.integers(0, 2)) for name in _LIMITS if name in mine}


def encoded(body: Any) -> bytes:
    """As JSON; unpaired surrogates stay, escaped."""
    return json.dumps(body).encode()


def check_answer(response: httpx.Response) -> None:
    """Fail unless it is a complete answer, or an error in OpenAI's format that is not the server's fault."""
    if response.status_code != 200:
        assert response.status_code in _REFUSED, (response.status_code, response.text)
        if response.request.url.path.startswith("/api/"):
            (message,) = response.json().values()
            assert set(response.json()) == {"error"} and isinstance(message, str) and message
        else:
            _check_error(response.json())
    elif response.headers["content-type"].startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], lines
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [event for event in response.text.split("\n\n") if event]
        values = [event.rpartition("data: ")[2] for event in events if not event.startswith(":")]
        named = events[0].startswith("event: ")
        if named:
            assert json.loads(values[-1])["type"] in ("response.completed", "response.incomplete")
        else:
            assert values.pop() == "[DONE]"
            assert not any("error" in json.loads(value) for value in values), values
    else:
        assert isinstance(response.json(), dict)


def _check_error(value: Any) -> None:
    assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}, value
    error = value["error"]
    assert error["message"] and error["type"]
    assert all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
