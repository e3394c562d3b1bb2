"""Questions of clients about texts: facts about the model, tokens of a text, text of tokens.  No torch, no Triton.

Answered without the engine and without the admin key: a request for text reveals the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

import inflight
from inflight.engine.messages import EngineReady
from inflight.frontend.chat.chat_template import ChatTemplate, ChatTemplateError
from inflight.frontend.chat.tool_format import reasoning_tags, tool_format
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest, is_foreign, plain_input
from inflight.frontend.request.limits import LimitError, Limits
from inflight.frontend.request.prompts import PromptReader
from inflight.frontend.request.values import field_of, to_bool, to_int
from inflight.frontend.text.fill_in_middle import fill_in_middle
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["TokenizeApi", "facts"]

# Question -> (inputs, exactly one must be given; request parameters).
_TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tokenize": (("text_input", "messages"), ("add_special_tokens", "return_token_strs", "truncate_prompt_tokens")),
    "detokenize": (("input_ids",), ()),
    "model": ((), ()),
    "tokenizer": ((), ()),
}
_GREETING = json.dumps([{"role": "user", "content": "Hello"}])
_CONTROL = {"control", "admin_key"}


def facts(checkpoint_id: str | None, ready: EngineReady, chat: ChatTemplate, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer to "model", without its adapters: facts that do not change while it is loaded."""
    tags = reasoning_tags(chat.text or "")
    fim = fill_in_middle(tokenizer)
    try:
        prompt = chat.render(_GREETING) if tags is not None else ""
    except ChatTemplateError:  # the template needs more than a greeting
        prompt = ""
    return {
        "checkpoint_id": checkpoint_id,
        "version": inflight.__version__,
        "max_model_len": ready.max_model_len,
        "vocab_size": ready.vocab_size,
        "has_chat_template": chat.text is not None,
        "takes_tools": "tools" in (chat.text or ""),
        "tool_format": tool_format(chat.text or ""),
        "reasoning_tags": None if tags is None else list(tags),
        "reasoning_opened": tags is not None and prompt.rstrip().endswith(tags[0]),
        "reasoning_token_ids": None if tags is None else _ids_of(tags, tokenizer),
        "special_tokens": tokenizer.special_tokens(),
        "generates": ready.pooler.generates,
        "pooling_tasks": ready.pooler.tasks,
        "embedding_size": ready.pooler.size,
        "labels": ready.pooler.labels,
        "fim_template": None if fim is None else fim[0],
        "fim_stop_token_ids": [] if fim is None else [end for end in fim[1] if end < ready.vocab_size],
    }


def _ids_of(tags: tuple[str, str], tokenizer: Tokenizer) -> list[int] | None:
    """The token of each tag; None if one has several."""
    try:
        tokens = [tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
    except TokenizerError:  # the checkpoint has none
        return None
    return [int(ids[0]) for ids in tokens] if all(len(ids) == 1 for ids in tokens) else None


class TokenizeApi:
    """Answers with JSON.  Threads can share it.

    Args:
        facts: result of the function `facts`.
        tokenizer_info: result of the function of that name.
        prompts: renders and tokenises, as for generation.
        limits: of a request.
        adapters: returns name -> id of those that requests can choose; None: LoRA is off.
    """

    names = tuple(_TAKES)

    def __init__(
        self,
        facts: Mapping[str, Any],
        tokenizer_info: Mapping[str, Any],
        tokenizer: Tokenizer,
        prompts: PromptReader,
        limits: Limits,
        adapters: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._facts = facts
        self._adapters = adapters
        self._tokenizer_info = msgspec.json.encode(tokenizer_info)
        self._max_model_len: int = facts["max_model_len"]
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limits = limits

    def answer(self, wire: WireRequest) -> dict[str, np.ndarray]:
        """The outputs for a request with a `control` in `names`.

        Raises:
            RequestError: INVALID_ARG; the message quotes the value and says what is allowed.
        """
        name = wire.parameters["control"]
        try:
            self._limits.check_inputs(wire.inputs, wire.parameters)
            inputs = self._inputs(name, wire)
            if name == "tokenize":
                text = self._tokenized(inputs, wire.parameters)
            elif name == "detokenize":
                text = self._detokenized(inputs["input_ids"])
            elif name == "model":
                adapters = None if self._adapters is None else self._adapters()
                text = msgspec.json.encode({**self._facts, "adapters": adapters})
            else:
                text = self._tokenizer_info
        except (TokenizerError, LimitError) as error:
            raise RequestError("INVALID_ARG", str(error)) from None
        return {"text_output": np.array([text], dtype=np.object_)}

    def _inputs(self, name: str, wire: WireRequest) -> dict[str, Any]:
        """The input of the question, if it has one."""
        inputs, parameters = _TAKES[name]
        given = {key for key in wire.parameters if not is_foreign(key)} | wire.inputs.keys()
        for key in sorted(given - _CONTROL - {*inputs, *parameters}):
            takes = f"takes {', '.join((*inputs, *parameters))}" if inputs else "takes nothing else"
            raise RequestError("INVALID_ARG", f"control={name!r} {takes}; got {key[:100]!r}")
        if inputs and len(wire.inputs) != 1:
            got = " and ".join(wire.inputs) or "none"
            raise RequestError("INVALID_ARG", f"control={name!r}: give {' or '.join(inputs)} as an input; got {got}")
        return {key: plain_input(key, array) for key, array in wire.inputs.items()}

    def _tokenized(self, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> bytes:
        is_text = "text_input" in inputs  # a rendered chat contains its special tokens
        adds = field_of(parameters, "add_special_tokens", to_bool, "true or false", is_text)
        spells = field_of(parameters, "return_token_strs", to_bool, "true or false", False)
        truncate = field_of(parameters, "truncate_prompt_tokens", to_int, "an integer", None)
        token_ids, kept = self._prompts.tokens(inputs, adds, truncate)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._max_model_len,
            "tokens": token_ids,
        }
        if truncate is not None:
            answer["prompt"] = kept
        if spells:
            answer["token_strs"] = [self._tokenizer.vocabulary_entry(token_id) for token_id in token_ids]
        return msgspec.json.encode(answer)

    def _detokenized(self, token_ids: list[int]) -> bytes:
        if self._tokenizer.is_absent:
            self._tokenizer.encode("")  # raises the error
        self._prompts.check_ids(token_ids)
        return msgspec.json.encode({"prompt": self._tokenizer.decode_all(token_ids)})
