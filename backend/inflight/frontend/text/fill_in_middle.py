"""How a tokenizer's family writes a gap between two texts, which the model fills.  No torch, no Triton.

Each family was trained with tokens of its own, in an order of its own: the text before the gap (prefix) and the text
behind it (suffix), then the mark where the model begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["FillInMiddle", "fill_in_middle"]


@dataclass(frozen=True)
class FillInMiddle:
    """A family.

    Attributes:
        marks: the tokens in the order of the prompt.
        template: the prompt, with `{prefix}` and `{suffix}`.
        ends: tokens that end the middle; a tokenizer need not have all of them.
    """

    marks: tuple[str, ...]
    template: str
    ends: tuple[str, ...]


def _prefix_first(prefix: str, suffix: str, middle: str, *ends: str) -> FillInMiddle:
    return FillInMiddle((prefix, suffix, middle), f"{prefix}{{prefix}}{suffix}{{suffix}}{middle}", ends)


# Sources: Qwen2.5-Coder's README, CodeGemma's model card, Granite's (4 has these names, the code models StarCoder's),
# arXiv 2402.19173 (StarCoder 2), arXiv 2308.12950 (Code Llama, prefix-suffix-middle), DeepSeek-Coder's README,
# mistral-common's `encode_fim` (Codestral: the suffix comes first, and no token marks the middle).
_FAMILIES = (
    _prefix_first(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        *("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"),
        *("<|file_separator|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ),
    _prefix_first(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        *("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ),
    _prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"),
    _prefix_first("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "</s>"),
    FillInMiddle(("[SUFFIX]", "[PREFIX]"), "[SUFFIX]{suffix}[PREFIX]{prefix}", ("</s>",)),
)


def fill_in_middle(tokenizer: Tokenizer) -> tuple[str, list[int]] | None:
    """The template and the ids of the ends, told by the vocabulary; None if it has no family's tokens.

    Having the tokens does not mean that the model was trained with them: some chat models inherited theirs.
    """
    for family in _FAMILIES:
        if None not in [tokenizer.token_id(mark) for mark in family.marks]:
            ends = (tokenizer.token_id(end) for end in family.ends)
            return family.template, sorted({token_id for token_id in ends if token_id is not None})
    return None
