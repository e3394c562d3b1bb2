"""Questions about a model: requests with the parameter `control`.  No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inflight_client.errors import ServerError
from inflight_client.request import ChatOptions, Message, chat_of, check_one_prompt, checked_ids, messages_json

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Question",
    "control_question",
    "detokenize_question",
    "json_answer",
    "model_question",
    "tokenize_question",
    "tokenizer_question",
]


@dataclass(frozen=True)
class Question:
    """A request with one text as its answer.

    Attributes:
        parameters: request parameters.
        inputs: tensors as (name, Triton data type, value).
    """

    parameters: Mapping[str, str | bool]
    inputs: Sequence[tuple[str, str, Any]] = field(default_factory=tuple)


def control_question(
    name: str, admin_key: str | None = None, parameters: Mapping[str, str | bool] | None = None
) -> Question:
    """The question `name`, with its parameters, and the admin key if there is one.

    Raises:
        ValueError: a parameter with a NUL, where Triton would end it.
    """
    for given, value in (parameters or {}).items():
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{given}: {value!r:.100} contains a NUL, which no parameter can; leave it out")
    key = {} if admin_key is None else {"admin_key": admin_key}
    return Question({**(parameters or {}), "control": name, **key})


def model_question() -> Question:
    """Asks for facts about the model."""
    return control_question("model")


def tokenizer_question() -> Question:
    """Asks for the settings of the tokenizer."""
    return control_question("tokenizer")


def tokenize_question(
    prompt: str | None,
    messages: Sequence[Message] | None,
    chat: ChatOptions,
    add_special_tokens: bool | None,
    return_token_strs: bool,
    truncate_prompt_tokens: int | None = None,
) -> Question:
    """Asks for the tokens of a text or chat.

    Raises:
        ValueError, TypeError: as `GenerationRequest.build`.
    """
    options = chat_of(chat, messages)
    check_one_prompt({"prompt": prompt, "messages": messages})
    parameters: dict[str, str | bool] = {"control": "tokenize"}
    if add_special_tokens is not None:
        parameters["add_special_tokens"] = add_special_tokens
    if return_token_strs:
        parameters["return_token_strs"] = True
    if truncate_prompt_tokens is not None:
        parameters["truncate_prompt_tokens"] = str(truncate_prompt_tokens)
    if messages is not None:
        return Question(parameters, [("messages", "BYTES", messages_json(messages, options))])
    return Question(parameters, [("text_input", "BYTES", prompt)])


def detokenize_question(token_ids: Sequence[int] | np.ndarray) -> Question:
    """Asks for the text of token ids.

    Raises:
        ValueError, TypeError: not integers, or out of the range of INT64.
    """
    return Question({"control": "detokenize"}, [("input_ids", "INT64", checked_ids("token_ids", token_ids))])


def json_answer(text: str) -> dict[str, Any]:
    """The answer as a dict.

    Raises:
        ServerError: it is no JSON object: the model is not one of Inflight's.
    """
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return answer
