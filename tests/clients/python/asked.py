"""Where the gateway is, and what clients ask the real model."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, Field

ROOT = os.environ.get("INFLIGHT_CLIENTS_URL", "http://127.0.0.1:8000")
URL = f"{ROOT}/v1"
KEY = os.environ.get("INFLIGHT_CLIENTS_KEY", "none")
MODEL = "smollm2"
SECONDS = 300.0  # that a client waits for an answer, on a busy machine

CAPITAL = "What is the capital of France?"  # SmolLM2 answers: The capital of France is Paris.
CHAT: list[Any] = [{"role": "user", "content": CAPITAL}]
QUERY = "Where is Paris?"
DOCUMENTS = ["It rains in spring.", "Where is Paris?", "Paris is the capital of France."]
BEST = 1  # the document that equals the query: the cosine of their embeddings is 1
SIZE = 576  # of an embedding of SmolLM2-135M
ADAPTER = "doll"  # of random weights
RAIN: list[Any] = [{"role": "user", "content": "Write a story about rain."}]  # long, greedy or not


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=9)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    job: Literal["baker", "pilot", "nurse"]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
    },
}
TIME: Any = {
    "type": "function",
    "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome for 3 days?"}]
ASK_PERSON: list[Any] = [{"role": "user", "content": "Tom is a baker. He is 42 years old. Write it as JSON."}]
