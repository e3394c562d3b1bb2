"""transformers' `generate()` with a checkpoint: greedy, in float32, each prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["Answers"]


class Answers:
    """Of one checkpoint; each prompt is computed once.

    Attributes:
        tokenizer, model: transformers' own.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._found: dict[tuple[int, ...], list[int]] = {}

    def chat(self, *turns: str) -> list[int]:
        """Token ids of the chat's prompt by its template.

        Args:
            turns: the user's, the assistant's, and so on; the last is the user's.
        """
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """The first `count` tokens of the answer to `prompt`, its EOS included."""
        known = self._found.get(tuple(prompt), [])
        eos = self.model.generation_config.eos_token_id
        if len(known) < count and known[-1:] != [eos]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
                )
            known = self._found[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return known[:count]
