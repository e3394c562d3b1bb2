"""docs/openai.md says what the code does: endpoints, keys of requests, codes of errors, metrics, options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight_gateway.anthropic.messages_body import MessagesBody
from inflight_gateway.app import _ENDPOINTS
from inflight_gateway.bodies import Body, SamplingBody
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.completions import CompletionBody
from inflight_gateway.default_tools import _INSTRUCTIONS
from inflight_gateway.metrics import Metrics
from inflight_gateway.ollama_input import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from inflight_gateway.ollama_models import _MANAGED, API_VERSION
from inflight_gateway.reasoning_formats import FORMATS as REASONING
from inflight_gateway.responses_input import ResponsesBody
from inflight_gateway.tool_parsers import _VLLM, FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_every_endpoint_is_listed() -> None:
    listed = {name for row in rows("Endpoints") for name in quoted(row[0])}
    assert listed == {f"{one.method} {one.path}" for one in _ENDPOINTS} | {"GET /openapi.json", "GET /docs"}


@pytest.mark.parametrize(("kind", "column"), [(CompletionBody, 1), (ChatBody, 2)])
def test_every_key_is_listed(kind: type[CompletionBody] | type[ChatBody], column: int) -> None:
    said = {name: row[column] for row in rows("Keys of requests") for name in quoted(row[0])}
    assert {name for name, answer in said.items() if answer == "yes"} == set(kind.__struct_fields__)
    text = section("Keys of requests").partition("Known, but **refused**")[2]
    refused, _, ignored = text.partition("**Ignored**")
    named = quoted(refused) | {name for name, answer in said.items() if answer == "refused"}
    assert set(kind.UNSUPPORTED) <= named and set(kind.IGNORED) <= quoted(ignored)
    assert not set(kind.__struct_fields__) & quoted(refused.partition("Parts of messages")[0])


def test_every_key_of_a_response_is_listed() -> None:
    own, refused, ignored, *_ = section("Responses").split("\n- ", 1)[1].split("\n- ")
    shared = set(SamplingBody.__struct_fields__)
    assert quoted(own) >= set(ResponsesBody.__struct_fields__) - shared
    assert quoted(refused) == set(ResponsesBody.UNSUPPORTED)
    assert quoted(ignored) == set(ResponsesBody.IGNORED)


def test_every_key_of_a_message_is_listed() -> None:
    own, refused, ignored, *_ = section("Anthropic's messages").split("\n- ", 1)[1].split("\n- ")
    assert quoted(own) >= set(MessagesBody.__struct_fields__) | {"thinking"}
    assert quoted(refused) == {*MessagesBody.UNSUPPORTED, "thread"}
    assert quoted(ignored.partition(". `context_management`")[0]) == set(MessagesBody.IGNORED)
    assert {"context_management", "thinking", "thread"} == set(MessagesBody.TRANSLATED)


def test_every_key_of_other_servers_is_listed() -> None:
    kinds: dict[str, tuple[type[Body], ...]] = {
        "all": (CompletionBody, ChatBody, ResponsesBody),
        "chats": (ChatBody,),
        "completions": (CompletionBody,),
        "responses": (ResponsesBody,),
    }
    listed = {
        (kind, name) for row in rows("Keys of other servers") for kind in kinds[row[1]] for name in quoted(row[0])
    }
    assert listed == {(kind, name) for kind in kinds["all"] for name in kind.TRANSLATED}


def test_nothing_is_called_refused_that_is_not() -> None:
    text = section("Keys of requests").partition("Known, but **refused**")[2]
    refused, _, ignored = text.partition("**Ignored**")
    assert quoted(refused.partition("Parts of messages")[0]) <= {*CompletionBody.UNSUPPORTED, *ChatBody.UNSUPPORTED}
    assert quoted(ignored.partition("\n\n")[0]) <= ChatBody.IGNORED | CompletionBody.IGNORED


def test_the_page_on_ollamas_api_lists_paths_and_options() -> None:
    page = (ROOT / "docs" / "ollama.md").read_text(encoding="utf-8")
    listed = quoted(page.partition("## Endpoints")[2].partition("## Options")[0])
    assert {f"{one.method} {one.path}" for one in _ENDPOINTS if one.path.startswith("/api/")} <= listed
    assert {f"/api/{name}" for name in _MANAGED} <= listed and API_VERSION in page
    options, _, keys = page.partition("## Options")[2].partition("| key |")
    assert set(OllamaOptions.__struct_fields__) <= quoted(options)
    own = {*OllamaChatBody.__struct_fields__, *OllamaGenerateBody.__struct_fields__, *OllamaGenerateBody.UNSUPPORTED}
    assert own - {"model", "stream", "options", "messages", "prompt", "raw", "suffix", "system"} <= quoted(keys)


def test_the_default_form_of_tools_is_quoted() -> None:
    tool = '{"type": "function", "function": {"name": "weather", "parameters": {...}}}'
    assert _INSTRUCTIONS.format(tools=tool) in section("Tools")


def test_every_format_is_listed() -> None:
    table = rows("Tools")
    assert {name for row in table for name in quoted(row[0])} == set(FORMATS)
    named = {name for row in table for name in quoted(row[2])}
    assert set(_VLLM) <= named <= {*_VLLM, *FORMATS}
    assert {*REASONING, "none"} <= quoted(section("Reasoning"))


def test_every_code_of_an_error_is_listed() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway" / "inflight_gateway").glob("*.py"))
    used = set(re.findall(r'code="(\w+)"', sources)) - {"NOT_FOUND"}
    listed = quoted(section("Errors"))
    assert used <= listed, used - listed


def test_every_metric_is_listed() -> None:
    text = Metrics().text().decode()
    kinds = dict(re.findall(r"^# TYPE (inflight_gateway_\w+) (\w+)$", text, re.MULTILINE))
    published = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    assert {row[0].strip("`"): row[1] for row in rows("Metrics")} == published


def test_every_option_exists() -> None:
    source = (ROOT / "tools" / "inflight_tools" / "gateway.py").read_text()
    source += (ROOT / "tools" / "inflight_tools" / "cli.py").read_text()
    for option in set(re.findall(r"`--([a-z][a-z-]+)`", PAGE)):
        assert re.search(rf"\b{option.replace('-', '_')}\b", source), f"there is no --{option}"
