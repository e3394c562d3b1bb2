"""Structural tags: free text in which certain marks begin parts that are constrained, and fixed sequences of parts.

Two forms are read, both of xgrammar, whose names vLLM and TensorRT-LLM took over: `{"structures": [...], "triggers":
[...]}`, and `{"type": "structural_tag", "format": {...}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.grammars.regex_size import check_regex
from inflight.grammars.schemas import checked_schema

__all__ = ["literal", "structural_tag_grammar"]

_FORMATS = (
    "const_string",
    "json_schema",
    "regex",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)


def structural_tag_grammar(
    tag: Any, json_options: dict[str, Any], additional_properties: bool, special_tokens: Mapping[str, int]
) -> str:
    """A Lark grammar.

    Args:
        json_options: for the JSON in it, as llguidance has them.
        additional_properties: see `checked_schema`.
        special_tokens: see `literal`.

    Raises:
        ValueError: neither form, or a format that is not supported.
    """
    rules = _Rules(json_options, additional_properties, special_tokens)
    if isinstance(tag, dict) and "structures" in tag:
        start = rules.triggered(_structures(tag), _texts(tag, "triggers"))
    elif isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        start = rules.of(tag["format"])
    else:
        raise ValueError(
            'structural_tag: must be {"structures": [{"begin", "schema", "end"}], "triggers": [...]} or '
            '{"type": "structural_tag", "format": {...}}'
        )
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines])


def _structures(tag: dict[str, Any]) -> list[dict[str, Any]]:
    """The tags of the older form, in the newer one."""
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(structure, dict) for structure in structures):
        raise ValueError("structural_tag: structures must be a list of objects")
    return [
        {
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end", ""),
        }
        for structure in structures
    ]


def _texts(owner: dict[str, Any], key: str) -> list[str]:
    value = owner.get(key)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"structural_tag: {key} must be a string or a list of strings")
    return texts


class _Rules:
    """Collects the rules of a grammar; methods return expressions."""

    def __init__(
        self, json_options: dict[str, Any], additional_properties: bool, special_tokens: Mapping[str, int]
    ) -> None:
        self.lines: list[str] = []
        self._json_options = json_options
        self._additional_properties = additional_properties
        self._special_tokens = special_tokens
        self._count = 0

    def of(self, part: Any) -> str:
        """Of one format."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _FORMATS:
            raise ValueError(f"structural_tag: format type {kind!r} is not supported: use one of {', '.join(_FORMATS)}")
        return getattr(self, f"_{kind}")(part)

    def triggered(
        self, tags: Sequence[dict[str, Any]], triggers: Sequence[str], least: int = 0, single: bool = False
    ) -> str:
        """Free text, in which a trigger can only become one of the tags that begin with it."""
        choices = []
        for trigger in triggers:
            fitting = [tag for tag in tags if _begins(tag, trigger)]
            if not fitting:
                raise ValueError(f"structural_tag: no tag begins with the trigger {trigger!r}")
            head = self._text_until([trigger])
            choices.append(f"{head} ({' | '.join(self._tag(tag, skipped=trigger) for tag in fitting)})")
        tag_rule = self._rule(" | ".join(choices))
        if single:
            return tag_rule if least else f"({tag_rule} | {self._any_text({})})"
        return f"{tag_rule}{'+' if least else '*'} {self._any_text({})}"

    def _text_until(self, ends: Sequence[str]) -> str:
        """Free text up to the first of the texts `ends`, which belongs to it."""
        choices = " | ".join(map(self._quoted, ends))
        if not any(name in end for name in self._special_tokens for end in ends):
            return self._rule(f"/(?s:.*)/ ({choices})", "[lazy]")
        if all(end.startswith(tuple(self._special_tokens)) for end in ends):
            return self._rule(f"{self._any_text({})} ({choices})")  # no special token is part of a text
        raise ValueError(
            f"structural_tag: {' and '.join(map(repr, ends))}: must all begin with special tokens, or contain none"
        )

    def _rule(self, body: str, options: str = "") -> str:
        self._count += 1
        name = f"part_{self._count}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _quoted(self, text: str) -> str:
        return literal(text, self._special_tokens)

    def _terminal(self, pattern: str) -> str:
        self._count += 1
        name = f"TEXT_{self._count}"
        self.lines.append(f"{name}: {regex_literal(pattern)}")
        return name

    def _const_string(self, part: dict[str, Any]) -> str:
        return self._quoted(_text(part, "value"))

    def _json_schema(self, part: dict[str, Any]) -> str:
        schema = checked_schema(part.get("json_schema", True), self._additional_properties)
        return "%json " + json.dumps({**schema, "x-guidance": self._json_options})

    def _regex(self, part: dict[str, Any]) -> str:
        pattern = _text(part, "pattern")
        check_regex(pattern)
        return self._terminal(pattern)

    def _any_text(self, part: dict[str, Any]) -> str:
        return self._terminal("(?s:.*)")

    def _sequence(self, part: dict[str, Any]) -> str:
        return self._rule(" ".join(map(self.of, _list(part, "elements"))))

    def _or(self, part: dict[str, Any]) -> str:
        return self._rule(" | ".join(map(self.of, _list(part, "elements"))))

    def _tag(self, part: dict[str, Any], skipped: str = "") -> str:
        begin, ends = _text(part, "begin").removeprefix(skipped), _texts({"end": "", **part}, "end")
        content = part.get("content", {"type": "any_text"})
        end = " | ".join(map(self._quoted, ends))
        if isinstance(content, dict) and content.get("type") == "any_text":  # up to the first end
            body = self._text_until(ends) if any(ends) else self._any_text({})
            return self._rule(f"{self._quoted(begin)} {body}")
        return self._rule(f"{self._quoted(begin)} {self.of(content)} ({end})")

    def _triggered_tags(self, part: dict[str, Any]) -> str:
        least, single = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))
        return self.triggered(_list(part, "tags"), _texts(part, "triggers"), int(least), single)

    def _tags_with_separator(self, part: dict[str, Any]) -> str:
        tag = self._rule(" | ".join(self._tag(tag) for tag in _list(part, "tags")))
        least = bool(part.get("at_least_one"))
        if part.get("stop_after_first"):
            return tag if least else f"({tag})?"
        some = f"{tag} ({self._quoted(_text(part, 'separator'))} {tag})*"
        return self._rule(some) if least else f"({self._rule(some)})?"


def _text(part: Any, key: str) -> str:
    value = part.get(key) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"structural_tag: {key} must be a string")
    return value


def _list(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"structural_tag: {key} must be a list with at least one element")
    return value


def _begins(tag: Any, trigger: str) -> bool:
    return _text(tag, "begin").startswith(trigger)


def regex_literal(pattern: str) -> str:
    """A regular expression in the Lark language."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n") + "/"


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text in the Lark language; names of special tokens in it become these tokens."""
    if not special_tokens:
        return json.dumps(text)
    names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{special_tokens[p]}]>" if p in special_tokens else json.dumps(p) for p in parts) or '""'
