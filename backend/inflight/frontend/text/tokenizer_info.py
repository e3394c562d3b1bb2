"""The answer to the question "tokenizer": the checkpoint's `tokenizer_config.json`, without paths."""

from __future__ import annotations

import json
from typing import Any

from inflight.frontend.text.tokenizer import TokenizerError, read_text
from inflight.hub import checkpoint_file

__all__ = ["tokenizer_info"]

# Texts that are no token.  Others can name folders of the machine on which the checkpoint was saved.
_TEXTS = {"tokenizer_class", "padding_side", "truncation_side"}
_NAMED_LISTS = {"model_input_names", "added_tokens_decoder"}


def tokenizer_info(source: str, revision: str | None, chat_template: str | None) -> dict[str, Any]:
    """The settings that concern texts and tokens, with the chat template that renders requests.

    Args:
        source: checkpoint directory, GGUF file or hub id.
        chat_template: Jinja source, or None.

    Raises:
        TokenizerError: the file is damaged.
    """
    path = checkpoint_file(source, "tokenizer_config.json", revision)
    try:
        found = {} if path is None else json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    settings = found if isinstance(found, dict) else {}
    kept = {name: value for name, value in settings.items() if _concerns_tokens(name, value)}
    return {"tokenizer_class": None, **kept, "chat_template": chat_template}


def _concerns_tokens(name: str, value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    return name in _TEXTS | _NAMED_LISTS or name.endswith(("_token", "_tokens"))
