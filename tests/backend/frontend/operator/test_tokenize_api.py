"""`control` "model", "tokenize" and "detokenize": answers without an engine, for everybody."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from chat_templates import HERMES
from frontend_rig import CHECKPOINT, RecordingClient, demo_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import inflight
from inflight.config import EngineConfig
from inflight.engine.messages import EngineReady
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.operator.admin_key import AdminKey
from inflight.frontend.operator.control import Control
from inflight.frontend.operator.tokenize_api import TokenizeApi, facts
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.tokenize_pool import DIRECT_BYTES, TokenizePool
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError
from inflight.frontend.text.tokenizer_info import tokenizer_info

TOKENIZER = demo_tokenizer()
MAX_LEN = 64
READY = EngineReady(MAX_LEN, 2560, [0], 8, 16, "float32", "cpu", "cpu", 0.1)


def make(chat: ChatTemplate, tokenizer: Tokenizer = TOKENIZER, max_model_len: int = MAX_LEN) -> TokenizeApi:
    parser = RequestParser(EngineConfig(model="m"), tokenizer, chat, max_model_len, 2560)
    told, settings = facts("c0ffee", READY, chat, tokenizer), tokenizer_info(str(CHECKPOINT), None, chat.text)
    return TokenizeApi(told, settings, tokenizer, parser.prompts, parser.limits)


QUESTIONS = make(ChatTemplate.load(str(CHECKPOINT)))


def wire(control: str, parameters: dict[str, Any] | None = None, **inputs: Any) -> WireRequest:
    arrays = {
        name: np.array(
            value if isinstance(value, list) else [value.encode()], dtype=object if name != "input_ids" else int
        )
        for name, value in inputs.items()
    }
    return WireRequest(arrays, {"control": control, **(parameters or {})})


def ask(control: str, parameters: dict[str, Any] | None = None, of: TokenizeApi = QUESTIONS, **inputs: Any) -> Any:
    outputs = of.answer(wire(control, parameters, **inputs))
    assert list(outputs) == ["text_output"] and outputs["text_output"].shape == (1,)
    return json.loads(outputs["text_output"][0])


def refused(*args: Any, **inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        ask(*args, **inputs)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


# -- tokenize and detokenize --------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_a_texts_tokens_are_those_of_a_prompt(text: str, special: bool) -> None:
    answer = ask("tokenize", {"add_special_tokens": special}, text_input=text)
    ids = TOKENIZER.encode(text, add_special_tokens=special)
    assert answer == {"count": len(ids), "max_model_len": MAX_LEN, "tokens": ids}
    assert ask("detokenize", input_ids=ids) == {"prompt": TOKENIZER.decode(ids, skip_special_tokens=False)}
    assert ask("detokenize", input_ids=ids)["prompt"].removeprefix("<|endoftext|>" if special else "") == text


def test_the_tokens_as_the_vocabulary_has_them() -> None:
    answer = ask("tokenize", {"return_token_strs": "true"}, text_input="the list<|im_end|>")
    assert answer["token_strs"][-2:] == ["Ġlist", "<|im_end|>"]
    assert len(answer["token_strs"]) == answer["count"]


def test_a_chats_tokens_are_those_of_its_prompt() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    said = "<|endoftext|><|im_start|>user\nhi<|im_end|>\n"
    assert ask("tokenize", messages=json.dumps(chat))["tokens"] == TOKENIZER.encode(said, add_special_tokens=False)
    assert "add_generation_prompt is a str" in refused(
        "tokenize", messages=json.dumps({**chat, "add_generation_prompt": "x"})
    )


def test_special_tokens_are_added_as_for_a_request_for_text() -> None:
    """The demo's tokenizer begins every text with a token, as Llama's does."""
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"bos_token": ""}})
    firsts = [
        ask("tokenize", {} if adds is None else {"add_special_tokens": adds}, **prompt)["tokens"][0] == 0
        for prompt in ({"text_input": "hi"}, {"messages": chat})
        for adds in (None, True, False)
    ]
    assert firsts == [True, True, False, False, True, False]


def test_a_text_may_be_longer_than_the_context() -> None:
    assert ask("tokenize", text_input="a b " * 100)["count"] > MAX_LEN
    assert "must be more than 63 tokens" in refused("tokenize", text_input="a" * 1_000_000)


@pytest.mark.parametrize("limit", [2, 5, 6, 7, 60, -1])
def test_a_truncated_prompt_is_that_of_a_request(limit: int) -> None:
    """The demo's tokenizer adds a token before a text, which is kept, and which is not part of the text."""
    chat = json.dumps([{"role": "user", "content": "one two three"}])
    for inputs in ({"text_input": "one two three four five"}, {"messages": chat}, {"text_input": "a b " * 100}):
        answer = ask("tokenize", {"truncate_prompt_tokens": str(limit)}, **inputs)
        parser = RequestParser(EngineConfig(model="m"), TOKENIZER, ChatTemplate.load(str(CHECKPOINT)), MAX_LEN, 2560)
        assert answer["tokens"] == parser.prompts.read(inputs, limit)[0]
        kept = answer["tokens"][1:] if "text_input" in inputs else answer["tokens"]
        assert answer["prompt"] == TOKENIZER.decode(kept, skip_special_tokens=False)
    assert "truncate_prompt_tokens=0: must be 1 to 64" in refused(
        "tokenize", {"truncate_prompt_tokens": "0"}, text_input="a"
    )


def test_no_tokens_are_no_error() -> None:
    assert ask("tokenize", {"add_special_tokens": False}, text_input="")["count"] == 0
    assert ask("detokenize", input_ids=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("control", "parameters", "inputs", "says"),
    [
        ("tokenize", {}, {}, "give text_input or messages as an input; got none"),
        ("tokenize", {}, {"text_input": "a", "messages": "[]"}, "give text_input or messages as an input; got text_"),
        ("tokenize", {}, {"input_ids": [5]}, "control='tokenize' takes text_input, messages, add_special_tokens, retu"),
        ("tokenize", {"add_special_token": True}, {"text_input": "a"}, "got 'add_special_token'"),
        (
            "tokenize",
            {"add_special_tokens": "maybe"},
            {"text_input": "a"},
            "add_special_tokens='maybe': must be true or",
        ),
        ("tokenize", {}, {"text_input": [b"\xff"]}, "text_input is not valid UTF-8"),
        ("tokenize", {}, {"text_input": [b"a", b"b"]}, "text_input has 2 elements"),
        ("tokenize", {}, {"messages": "[]"}, "messages: got an empty list"),
        ("tokenize", {}, {"text_input": "a" * (8 * 2**20 + 1)}, "max_input_bytes in model.json"),
        ("detokenize", {}, {}, "give input_ids as an input; got none"),
        ("detokenize", {}, {"input_ids": [5, 2560]}, "token id 2560 is not in the vocabulary [0, 2559]"),
        ("model", {"x": 1}, {}, "control='model' takes nothing else; got 'x'"),
    ],
)
def test_an_invalid_request_is_named(
    control: str, parameters: dict[str, Any], inputs: dict[str, Any], says: str
) -> None:
    assert says in refused(control, parameters, **inputs)


def test_parameters_of_triton_and_proxies_are_ignored() -> None:
    ask("tokenize", {"triton_enable_empty_final_response": True, "x-tenant": "a", "admin_key": "k"}, text_input="a")


def test_a_checkpoint_without_tokenizer_says_so(tmp_path: Path) -> None:
    questions = make(ChatTemplate(None), Tokenizer.load(str(tmp_path), required=False))
    assert "has no tokenizer" in refused("tokenize", of=questions, text_input="a")
    assert "has no tokenizer" in refused("detokenize", of=questions, input_ids=[5])
    assert ask("model", of=questions)["special_tokens"] == {}


# -- the facts ----------------------------------------------------------------------------------


def test_the_facts() -> None:
    assert ask("model") == {
        "checkpoint_id": "c0ffee",
        "version": inflight.__version__,
        "max_model_len": MAX_LEN,
        "vocab_size": 2560,
        "has_chat_template": True,
        "takes_tools": False,
        "tool_format": None,
        "reasoning_tags": None,
        "reasoning_opened": False,
        "reasoning_token_ids": None,
        "special_tokens": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        "generates": True,
        "pooling_tasks": [],
        "embedding_size": 0,
        "labels": [],
        "fim_template": None,
        "fim_stop_token_ids": [],
        "adapters": None,
    }
    told = ask("model", of=make(ChatTemplate(HERMES)))
    assert (told["tool_format"], told["reasoning_tags"]) == ("hermes", ["<think>", "</think>"])
    assert told["takes_tools"] is True
    assert told["reasoning_opened"] is False
    assert told["reasoning_token_ids"] is None, "this vocabulary spells the tags"
    told = ask("model", of=make(ChatTemplate(None)))
    assert (told["has_chat_template"], told["tool_format"], told["reasoning_tags"]) == (False, None, None)


def test_tags_that_are_tokens(tmp_path: Path) -> None:
    vocabulary = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    vocabulary.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    told = ask("model", of=make(ChatTemplate(HERMES), Tokenizer.load(str(tmp_path), required=True)))
    assert told["reasoning_token_ids"] == [vocabulary.token_to_id("<think>"), vocabulary.token_to_id("</think>")]


def with_tokens(folder: Path, *marks: str, special: bool = False) -> Tokenizer:
    """The demo's tokenizer with further tokens."""
    vocabulary = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    vocabulary.add_tokens([tokenizers.AddedToken(mark, normalized=False, special=special) for mark in marks])
    vocabulary.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(str(folder), required=True)


@pytest.mark.parametrize(
    ("marks", "template", "ends"),
    [
        (
            ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
            "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
            {"<|endoftext|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"},
        ),
        (
            ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"),
            "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
            {"<|endoftext|>", "<file_sep>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"},
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
            "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
            {"<｜end▁of▁sentence｜>"},
        ),
        (
            ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
            "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",
            {"▁<EOT>"},
        ),
        (("[PREFIX]", "[SUFFIX]", "</s>"), "[SUFFIX]{suffix}[PREFIX]{prefix}", {"</s>"}),
        (("<fim_prefix>", "<fim_suffix>"), None, set()),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_the_vocabulary_tells_how_gaps_are_filled(
    tmp_path: Path, marks: tuple[str, ...], template: str | None, ends: set[str], special: bool
) -> None:
    tokenizer = with_tokens(tmp_path, *marks, special=special)
    told = facts(None, msgspec.structs.replace(READY, vocab_size=9999), ChatTemplate(None), tokenizer)
    assert told["fim_template"] == template
    assert {tokenizer.vocabulary_entry(end) for end in told["fim_stop_token_ids"]} == ends
    told = facts(None, msgspec.structs.replace(READY, vocab_size=3), ChatTemplate(None), tokenizer)
    assert all(end < 3 for end in told["fim_stop_token_ids"]), "the model has no others"


def test_the_tokenizers_settings_have_no_paths(tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "name_or_path": "/home/operator/secret",
        "tokenizer_file": "/home/operator/tokenizer.json",
        "special_tokens_map_file": "/x",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "additional_special_tokens": ["<a>"],
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
        "model_max_length": 1e30,
        "add_bos_token": True,
        "chat_template": "the checkpoint's",
        "auto_map": {"AutoTokenizer": ["x.py"]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    told = tokenizer_info(str(tmp_path), None, "the operator's")
    assert told == {
        name: settings[name]
        for name in (
            "tokenizer_class",
            "bos_token",
            "additional_special_tokens",
            "added_tokens_decoder",
            "model_max_length",
            "add_bos_token",
        )
    } | {"chat_template": "the operator's"}
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert tokenizer_info(str(tmp_path), None, None) == {"tokenizer_class": None, "chat_template": None}
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        tokenizer_info(str(tmp_path), None, None)


def test_the_tokenizers_settings_are_told() -> None:
    told = ask("tokenizer")
    assert "im_start" in told["chat_template"] and set(told) >= {"tokenizer_class", "chat_template"}
    assert "takes nothing else" in refused("tokenizer", {"x": 1})


@pytest.mark.parametrize(
    ("end", "opened"),
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False), ("{{ raise_exception('no') }}", False)],
)
def test_a_template_may_open_the_reasoning_itself(end: str, opened: bool) -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}{% if add_generation_prompt %}" + end + "{% endif %}"
    assert ask("model", of=make(ChatTemplate(template)))["reasoning_opened"] is opened


# -- where they are answered --------------------------------------------------------------------


def test_no_key_is_needed() -> None:
    for key in (None, "0123456789abcdef"):
        for control in TokenizeApi.names:
            AdminKey(key).check(WireRequest({}, {"control": control}))


def test_the_names_are_known_to_control() -> None:
    unused: Any = SimpleNamespace(ask=Future)
    control = Control(unused.ask, unused, unused, text_questions=TokenizeApi.names)
    assert control.answer(wire("tokenize", text_input="a")) is None
    with pytest.raises(RequestError, match='or "drain" or "tokenize" or "detokenize" or "model" or "tokenizer"'):
        control.answer(wire("tokenise"))


class OutputProcessor:
    """Sends at once what it is given; opens nothing."""

    def respond(self, responder: RecordingClient, outputs: dict[str, np.ndarray]) -> None:
        responder.send(outputs, True)

    def reject(self, responder: RecordingClient, error: RequestError) -> None:
        responder.fail(error.code, error.message)


@pytest.fixture
def pool() -> Any:
    pool = TokenizePool(None, OutputProcessor(), print)  # type: ignore[arg-type]
    yield pool
    pool.stop()


LARGE = make(ChatTemplate.load(str(CHECKPOINT)), max_model_len=4096)


def taken(pool: TokenizePool, request: WireRequest) -> RecordingClient:
    client = RecordingClient()
    with pool.errors_to(client):
        pool.take(request, client, LARGE.answer)
    return client


def test_short_ones_are_answered_at_once_and_long_ones_by_a_thread(pool: TokenizePool) -> None:
    chat = json.dumps([{"role": "user", "content": "hi"}])
    long = [
        wire("tokenize", text_input="a " * DIRECT_BYTES),
        wire("tokenize", messages=chat),
        wire("detokenize", input_ids=[5] * DIRECT_BYTES),
    ]
    for request in (wire("tokenize", text_input="a"), wire("detokenize", input_ids=[5]), wire("model")):
        assert taken(pool, request).responses, "answered before `take` returned"
    waiting = [taken(pool, request) for request in long]
    assert not any(client.finals for client in waiting)
    pool.start()
    assert all(client.wait().responses for client in waiting)


def test_a_thread_sends_errors_too(pool: TokenizePool) -> None:
    pool.start()
    assert "max_input_bytes" in str(taken(pool, wire("tokenize", text_input="a" * 2**24)).wait().error)


def test_a_resumed_request_that_is_no_question_counts_its_output() -> None:
    from inflight.frontend.request.tokenize_pool import _num_text_bytes

    ids = np.array([5] * 10)
    assert _num_text_bytes(WireRequest({"resume_token_ids": ids, "input_ids": ids})) == 160 + 10
    assert _num_text_bytes(WireRequest({"input_ids": ids})) == 5
    assert _num_text_bytes(WireRequest({"input_ids": ids}, {"control": "detokenize"})) == 160 + 5 + 2
