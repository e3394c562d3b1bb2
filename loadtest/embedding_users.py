"""A Locust user that embeds texts beside the chats of the other users: `locust ... OpenAIUser EmbeddingUser`."""

from __future__ import annotations

import random
from typing import ClassVar

import gevent
from locust import FastHttpUser, task

from inflight_tools.workload.scenarios import Job
from loadtest.prompts import WordPrompts

__all__ = ["EmbeddingUser"]

_TEXTS = 16  # of a request
_TOKENS = (32, 512)  # of a text, the fewest and the most
_FAILED_SECONDS = 0.5  # as of the other users


class EmbeddingUser(FastHttpUser):
    """Always one of `--users`: it asks for the vectors of 16 texts as soon as it has the last ones.

    Attributes:
        model: of the gateway at the host; "": its only one.
        key: for it; "": none.
        seed: of the load; repeats the texts.
    """

    fixed_count = 1
    model: ClassVar[str] = ""
    key: ClassVar[str] = ""
    seed: ClassVar[int] = 0

    def on_start(self) -> None:
        self._lengths = random.Random(self.seed)
        self._prompts = WordPrompts(self.seed + 1)  # not the beginnings of the chats
        self._index = 0

    @task
    def embed(self) -> None:
        body = {
            "input": [self._text() for _ in range(_TEXTS)],
            "encoding_format": "base64",
            "truncate_prompt_tokens": -1,
            **({"model": self.model} if self.model else {}),
        }
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with self.client.post(
            "/v1/embeddings", json=body, headers=headers, name=f"{_TEXTS} embeddings", catch_response=True
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:300]}")
                gevent.sleep(_FAILED_SECONDS)

    def _text(self) -> str:
        self._index += 1
        return self._prompts.make(Job(self._index, "embedding", self._lengths.randint(*_TOKENS), 0))
