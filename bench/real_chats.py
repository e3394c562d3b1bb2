"""Chats with SmolLM2-135M-Instruct, for `speculation.py`: answers repeat the text before them often or hardly."""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

Turns = list[str]  # the user's, the assistant's, and so on
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # as the model's own page recommends
THINGS = ("lighthouse", "fox", "clock", "river", "baker", "robot", "mountain", "violin", "pirate", "garden", "train")
LINES = (8, 25)  # of a function
WORDS = (40, 160)  # of a passage


def functions() -> Iterator[tuple[str, str]]:
    """Source and first parameter of functions of the standard library."""
    for path in sorted(Path(os.path.dirname(os.__file__)).glob("*.py"))[:60]:
        source = path.read_text(errors="ignore")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.args.args:
                text = ast.get_source_segment(source, node) or ""
                if LINES[0] <= text.count("\n") + 1 <= LINES[1]:
                    yield text, node.args.args[0].arg


def passages() -> Iterator[str]:
    """Paragraphs of Python's documentation."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if WORDS[0] <= len(paragraph.split()) <= WORDS[1]:
                yield " ".join(paragraph.split())


class RealChats:
    """Draws chats; each work is a method.

    Attributes:
        folder: the checkpoint.
    """

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.folder = common.smollm2()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self._functions = list(functions())
        self._passages = list(passages())
        self.works: dict[str, Callable[[random.Random], Turns]] = {
            "edit": self._edit, "quote": self._quote, "chat": self._chat, "free": self._free
        }  # fmt: skip

    def request(self, name: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a prompt, and how to sample the answer."""
        roles = ("user", "assistant")
        turns = self.works[name](rng)
        messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        return ids, SAMPLING

    def _edit(self, rng: random.Random) -> Turns:
        source, parameter = rng.choice(self._functions)
        task = f"Rename `{parameter}` to `value` in this function and write all of it again:"
        return [f"{task}\n\n```python\n{source}\n```"]

    def _quote(self, rng: random.Random) -> Turns:
        return [f"{rng.choice(self._passages)}\n\nQuote the two most important sentences of this text, word for word."]

    def _chat(self, rng: random.Random) -> Turns:
        first, second = rng.sample(self._passages, 2)
        return ["How does this work in Python?", first, "And this?", second, "Say both again, as a list of points."]

    def _free(self, rng: random.Random) -> Turns:
        one, other = rng.sample(THINGS, 2)
        return [f"Write a story about a {one} and a {other}."]
