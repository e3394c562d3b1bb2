"""The converted checkpoint is SmolLM2: its own tokenizer, and through Triton the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.catalogue import KEY

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("clients")]

QUESTIONS = ("What is the capital of France?", "Write a story about rain in 1987.", "def fibonacci(n):", "Ça va, 你好?")


@pytest.fixture(scope="module")
def transformers(smollm2: Path) -> Any:
    """Tokenizer and model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(smollm2), model


def test_the_tokenizer_is_that_of_smollm2(transformers: Any) -> None:
    tokenizer, _ = transformers
    tokens = tokenizer.tokenize("<|im_start|>user\nIn 1987 it's naïve")
    assert tokens == ["<|im_start|>", "user", "Ċ", "In", "Ġ", *"1987", "Ġit", "'s", "Ġna", "Ã¯ve"]
    assert tokenizer.all_special_tokens[:3] == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    text = "Ça va, 你好? 🎉\n\n  x = 1"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(question: str, transformers: Any, gateway: str) -> None:
    tokenizer, model = transformers
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{gateway}/chat/completions", json=body, headers=headers, timeout=300).json()
    assert answer["prompt_token_ids"] == prompt["input_ids"][0].tolist()
    assert answer["choices"][0]["token_ids"] == output.tolist()
