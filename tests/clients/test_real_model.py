"""The real model through Triton and the gateway: transformers' answers, and calls and JSON that fit the question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from transformers_answers import Answers

from tests.clients.catalogue import KEY

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("clients")]

QUESTIONS = ("What is the capital of France?", "Write a story about rain in 1987.", "def fibonacci(n):", "Ça va, 你好?")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["baker", "pilot", "nurse"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def answers(smollm2: Path) -> Answers:
    return Answers(smollm2)


def ask(gateway: str, question: str, **keys: Any) -> dict[str, Any]:
    """A greedy answer: the whole response."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0, **keys}
    response = httpx.post(
        f"{gateway}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=300
    )
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(question: str, answers: Answers, gateway: str) -> None:
    prompt = answers.chat(question)
    answer = ask(gateway, question, max_tokens=40, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == answers.tokens(prompt, 40)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_takes_its_arguments_from_the_question(choice: Any, gateway: str) -> None:
    (answer,) = ask(
        gateway,
        "What is the weather in Rome for 3 days?",
        tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=100,
    )["choices"]  # fmt: skip
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER)
    assert arguments == {"city": "Rome", "days": 3}


def test_an_answer_in_a_schema_says_what_the_question_says(gateway: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    question = "Tom is a baker. He is 42 years old. Write it as JSON."
    (answer,) = ask(gateway, question, response_format=form, max_tokens=200)["choices"]
    assert answer["finish_reason"] == "stop"
    found = json.loads(answer["message"]["content"])
    jsonschema.validate(found, PERSON)
    assert found == {"name": "Tom", "age": 42, "job": "baker"}
