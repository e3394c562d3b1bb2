"""The tags around a model's reasoning, by the operator's choice or the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["FORMATS", "check_reasoning_parser", "reasoning_tags"]

# By vLLM's names for `--reasoning-parser`.
FORMATS: dict[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "qwen3": ("<think>", "</think>"),
}


def check_reasoning_parser(parser: str) -> None:
    """Check the operator's choice: a name in `FORMATS`, "none", or "" to detect it from the chat template.

    Raises:
        ValueError: it is none of these.
    """
    if parser and parser != "none" and parser not in FORMATS:
        raise ValueError(f"reasoning_parser {parser!r}: must be none, or one of {', '.join(FORMATS)}")


def reasoning_tags(parser: str, info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The tags of a model's reasoning; None for a model without reasoning.

    Args:
        parser: the operator's choice: see `check_reasoning_parser`.
        info: facts about the model, with `reasoning_tags`.
    """
    if parser:
        return None if parser == "none" else FORMATS[parser]
    tags = info.get("reasoning_tags")
    if isinstance(tags, Sequence) and len(tags) == 2 and all(isinstance(tag, str) and tag for tag in tags):
        return tags[0], tags[1]
    return None
