"""Prompts of the Python interface -> token ids.  No torch, no Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Union

from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = [
    "Conversation",
    "Prompt",
    "is_conversation",
    "is_prompt",
    "listed",
    "read_chat",
    "read_prompt",
    "text_or_ids",
]

# A text; token ids; or one of the two in a dict, as vLLM's `TextPrompt` and `TokensPrompt`:
# {"prompt": "..."} or {"prompt_token_ids": [...]}, where "prompt" can accompany the ids for the record.
Prompt = Union[str, Sequence[int], Mapping[str, Any]]

# Messages such as {"role": "user", "content": "..."}, as in OpenAI's API.
Conversation = Sequence[Mapping[str, Any]]


def listed(value: Any) -> Any:
    """An array of numpy or torch as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_prompt(value: Any) -> bool:
    """Whether this is one prompt and not a collection of prompts."""
    if isinstance(value, (str, bytes, Mapping)):
        return True
    return isinstance(value, Sequence) and bool(value) and all(_is_id(entry) for entry in value)


def read_prompt(prompt: Any, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """The prompt's text, if it has one, and its token ids.

    Raises:
        ValueError: it is no prompt, or a text although there is no tokenizer.
    """
    text, ids = text_or_ids(prompt)
    return text, tokenizer.encode(text or "") if ids is None else ids


def text_or_ids(prompt: Any) -> tuple[str | None, list[int] | None]:
    """The prompt's text and its token ids, one of them None if it has none; raises ValueError if it is no prompt."""
    prompt = listed(prompt)
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt)
    return None, _ids("a prompt", prompt)


def is_conversation(value: Any) -> bool:
    """Whether this is one conversation and not a collection of conversations."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], (Mapping, str))


def read_chat(
    conversation: Any, options: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[str, list[int]]:
    """The prompt of a conversation, and its token ids.

    Args:
        options: other keys of the input `messages` (`frontend/chat/chat_messages.py`).

    Raises:
        ChatTemplateError: there is no template, or it rejects the conversation.
        ValueError: the conversation is not made of JSON's types, or there is no tokenizer.
    """
    try:
        chat = json.dumps({"messages": conversation, **options})
    except (TypeError, ValueError) as error:
        raise ValueError(f"a conversation is made of dicts, lists, texts and numbers: {error}") from None
    text = template.render(chat)
    return text, tokenizer.encode(text, add_special_tokens=False)  # the template spells out the special tokens


def _of_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    asked = {key: value for key, value in prompt.items() if value is not None}
    unknown = sorted(map(str, asked.keys() - {"prompt", "prompt_token_ids"}))
    text = asked.get("prompt")
    if unknown or not asked or not isinstance(text, (str, type(None))):
        got = ", ".join(unknown) or (f'"prompt" of type {type(text).__name__}' if asked else "nothing")
        raise ValueError(
            f'a prompt in a dict has {got}: give {{"prompt": "text"}} or {{"prompt_token_ids": [1, 2, 3]}}, and no '
            "other keys"
        )
    if "prompt_token_ids" in asked:
        return text, _ids("prompt_token_ids", asked["prompt_token_ids"])
    return text, None


def _ids(name: str, value: Any) -> list[int]:
    try:
        value = listed(value)
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        ids = [int(entry) for entry in value]
        if any(isinstance(entry, str) or entry != number for entry, number in zip(value, ids)):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"{name} of type {type(value).__name__} is not a list of token ids, nor a string") from None
    return ids


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
