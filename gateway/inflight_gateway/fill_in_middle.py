"""Completions with `suffix`: prompt and suffix -> a prompt whose continuation fills the gap between them.

The model tells the template (docs/wire-contract.md), because it depends on the family of its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight_gateway.errors import invalid

__all__ = ["FillInMiddle", "check_fim_template", "fill_in_middle"]

_CODE = "unsupported_parameter"
_PREFIX, _SUFFIX = "{prefix}", "{suffix}"


@dataclass(frozen=True)
class FillInMiddle:
    """How to fill a gap in front of a suffix.

    Attributes:
        template: of the prompt.
        suffix: the text behind the gap.
        stop_token_ids: tokens that end the middle.
    """

    template: str
    suffix: str
    stop_token_ids: list[int]

    def prompt(self, prefix: str) -> str:
        """The prompt for the text before the gap.  The texts can contain anything, the places' names included."""
        before, _, after = self.template.partition(_PREFIX)
        return before.replace(_SUFFIX, self.suffix) + prefix + after.replace(_SUFFIX, self.suffix)


def check_fim_template(template: str) -> None:
    """Check the operator's choice: a template with both places, "none", or "" to ask the model.

    Raises:
        ValueError: it is none of these.
    """
    if template not in ("", "none") and not template.count(_PREFIX) == template.count(_SUFFIX) == 1:
        raise ValueError(
            f"fim_template {template!r}: must be none, or a text with {_PREFIX} and {_SUFFIX} once each, such as "
            "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
        )


def fill_in_middle(template: str, info: Mapping[str, Any], model: str, suffix: str) -> FillInMiddle:
    """How the model fills gaps.

    Args:
        template: the operator's choice, see `check_fim_template`.
        info: facts about the model, with `fim_template` and `fim_stop_token_ids`.
        model: its name.
        suffix: the text behind the gap.

    Raises:
        APIError: it cannot.
    """
    if template == "none":
        raise invalid("suffix: this gateway fills no gaps (--fim-template none); leave it out", "suffix", _CODE)
    chosen = template or info.get("fim_template")
    if not isinstance(chosen, str) or not chosen:
        raise invalid(
            f"suffix: the tokenizer of model {model!r} has none of the known tokens for fill-in-the-middle; leave it "
            "out, or start the gateway with --fim-template if the model was trained for it",
            "suffix",
            _CODE,
        )
    ends = info.get("fim_stop_token_ids")
    return FillInMiddle(chosen, suffix, list(ends) if isinstance(ends, list) else [])
