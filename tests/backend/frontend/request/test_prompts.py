"""Texts, token ids and messages as prompts, and prompts that are cut."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT
from parser_rig import CHAT, MAX_LEN, PARSER, TOKENIZER, VOCAB, parse, rejected, sent, tensor

from inflight.config import EngineConfig
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.text.tokenizer import Tokenizer


def test_input_ids_of_either_width() -> None:
    for dtype in (np.int64, np.int32):
        request = PARSER.parse(WireRequest({"input_ids": np.array([5, 6], dtype=dtype)}))
        assert request.engine_request.prompt_token_ids == [5, 6]
        assert request.prepend_text == ""
    request = parse(text_input=None, input_ids=[5, 6], exclude_input_in_output=False)
    assert request.prepend_text == TOKENIZER.decode([5, 6])


def test_messages_are_rendered_with_the_template() -> None:
    request = parse(text_input=None, messages='[{"role": "user", "content": "hi"}]')
    assert TOKENIZER.decode(request.engine_request.prompt_token_ids, skip_special_tokens=False) == (
        "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.prepend_text == ""


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"text_input": None}, "give exactly one of text_input, input_ids, messages"),
        (
            {"text_input": "", "messages": "", "input_ids": [5], "stop": "", "sampling_parameters": "{"},
            "not valid JSON",
        ),
        ({"text_input": None, "input_ids": []}, "give exactly one of"),
        ({"input_ids": [5]}, "got text_input and input_ids: give exactly one"),
        ({"text_input": "word " * 100}, "tokens: it must be 1 to 63 long"),
        ({"text_input": "word " * 100_000}, "must be more than 63 tokens"),
        ({"text_input": None, "input_ids": [5] * MAX_LEN}, "the prompt has 64 tokens: it must be 1 to 63 long"),
        ({"text_input": None, "input_ids": [5, VOCAB]}, "token id 2560 is not in the vocabulary [0, 2559]"),
        ({"text_input": None, "messages": "hi"}, "messages: not valid JSON"),
        ({"text_input": None, "messages": '[{"content": "x"}]'}, "message 0 is not an object with a role"),
        ({"text_input": None, "messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages: not valid JSON"),
        ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters='[1]': must be a JSON object"),
    ],
)
def test_invalid_prompts(inputs: dict[str, Any], says: str) -> None:
    assert says in rejected(**inputs)


def test_an_empty_text_beside_ids_does_not_count_as_a_prompt() -> None:
    assert sent(text_input="", input_ids=[5]).prompt_token_ids == [5]


def test_invalid_utf8_names_the_byte() -> None:
    wire = WireRequest({"text_input": np.array([b"abc\xff"], dtype=np.object_)})
    with pytest.raises(RequestError, match="text_input is not valid UTF-8: byte 0xff at 3"):
        PARSER.parse(wire)


def test_an_empty_text_is_the_start_token_where_the_tokenizer_adds_one() -> None:
    assert sent(text_input="").prompt_token_ids == TOKENIZER.encode("") == [0]
    assert parse(text_input="").prepend_text == ""
    bare = Tokenizer.load(str(CHECKPOINT))
    bare.encode = lambda text, *, add_special_tokens=True: TOKENIZER.encode(text, add_special_tokens=False)
    plain = RequestParser(EngineConfig(model="m"), bare, CHAT, MAX_LEN, VOCAB)
    with pytest.raises(RequestError, match="text_input is empty, and the tokenizer adds no start token"):
        plain.parse(WireRequest({"text_input": tensor("text_input", "")}))


WORDS = " ".join(f"word{k}" for k in range(60))


@pytest.mark.parametrize("count", [2, 62])
def test_a_truncated_text_keeps_its_start_token_and_its_end(count: int) -> None:
    whole = TOKENIZER.encode(WORDS)
    found = sent({"truncate_prompt_tokens": count}, text_input=WORDS).prompt_token_ids
    assert found == [whole[0], *whole[len(whole) - count + 1 :]]
    assert len(found) == count
    assert parse({"truncate_prompt_tokens": count}, text_input=WORDS).prepend_text == WORDS


def test_truncation_to_what_fits() -> None:
    assert "tokens: it must be 1 to 63 long" in rejected(text_input=WORDS)
    assert len(sent({"truncate_prompt_tokens": -1}, text_input=WORDS).prompt_token_ids) == MAX_LEN - 1
    assert len(sent({"truncate_prompt_tokens": -1}, text_input=WORDS * 9999).prompt_token_ids) == MAX_LEN - 1
    assert sent({"truncate_prompt_tokens": 1}, text_input=WORDS).prompt_token_ids == TOKENIZER.encode(WORDS)[-1:]
    assert sent({"truncate_prompt_tokens": 9}, text_input="the list").prompt_token_ids == TOKENIZER.encode("the list")
    ids = sent({"truncate_prompt_tokens": 2}, text_input=None, input_ids=[5, 6, 7]).prompt_token_ids
    assert ids == [6, 7], "ids are taken as they are"
    messages = json.dumps([{"role": "user", "content": WORDS}])
    rendered = TOKENIZER.encode(CHAT.render(messages), add_special_tokens=False)
    ids = sent({"truncate_prompt_tokens": 30}, text_input=None, messages=messages).prompt_token_ids
    assert ids == rendered[-30:]
