"""The constraint on an output, as data: made by the frontend, compiled in the engine process.  No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["BEYOND_LIMITS", "GrammarKind", "GrammarSpec"]

# Begins what is said of a grammar that the library gives up: the request is at fault, whenever it shows.
BEYOND_LIMITS = "the grammar is beyond the limits of the library: simplify it"

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """One constraint on a whole output.  Hashable, so that equal ones are compiled once.

    Attributes:
        kind: what `text` is.
        text: a JSON Schema, a regular expression that the whole output matches, a JSON list of strings (the output is
            one of them), a grammar (Lark as llguidance reads it, GBNF or EBNF), or a structural tag as JSON: free
            text with constrained parts.
        whitespace: regular expression of the text between the tokens of JSON; "" is nothing, None a default.
        additional_properties: whether objects may have properties that their schema does not name, where it does not
            say.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None
    additional_properties: bool = True

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.text) + len(self.whitespace or "")
