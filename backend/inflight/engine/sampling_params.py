"""The parameters of a request: how its tokens are chosen and when it ends.  No torch."""

from __future__ import annotations

import msgspec

from inflight.grammars.spec import GrammarSpec

__all__ = ["SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen and when it ends.

    Names, ranges and defaults are vLLM's.

    Attributes:
        n: sequences sampled from the prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens below `min_p` times the largest probability, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted once from tokens of the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id -> value added to its logit before everything else.
        grammar: what the output must match; `None`: anything.  Its end ends the sequence.
        allowed_token_ids: the only token ids that may be chosen; `None`: all.
        bad_words_ids: token id sequences that must not appear in the output.
        stop: texts that end the request; matched by the frontend, which owns the text.
        stop_token_ids: token ids that end the request, beside the checkpoint's EOS ids.
        include_stop_str_in_output: keep the matched stop text in the output.
        ignore_eos: do not end at the checkpoint's EOS ids.
        max_tokens: most output tokens.
        min_tokens: EOS and stop token ids are masked until this many output tokens.
        logprobs: return the chosen token's log probability and this many top ones; -1: the whole vocabulary.
        prompt_logprobs: the same for each prompt token.
        seed: with it the output depends only on (weights, prompt, params, seed).
        skip_special_tokens: leave special tokens out of the text.
        detokenize: convert the output to text; False: return token ids only.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    grammar: GrammarSpec | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] = []
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Raise `ValueError` naming the first parameter out of range, its value and the range.

        Args:
            vocab_size: when given, token ids in `logit_bias`, `stop_token_ids`, `allowed_token_ids` and
                `bad_words_ids` must lie in [0, vocab_size).
        """
        for name, low, high, open_low in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not (value > low if open_low else value >= low) or value > high:  # NaN fails too
                bracket = "(" if open_low else "["
                raise ValueError(f"{name}={value!r} is out of range: must be in {bracket}{low}, {high}]")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower one or raise the other"
            )
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty: give at least one token id, or omit it")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs the text: omit detokenize=False, or give stop_token_ids instead")
        if vocab_size is not None:
            self._validate_token_ids(vocab_size)

    def _validate_token_ids(self, vocab_size: int) -> None:
        named = [
            ("logit_bias", list(self.logit_bias or ())),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words_ids", [t for word in self.bad_words_ids for t in word]),
        ]
        for name, ids in named:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is not in the vocabulary [0, {vocab_size - 1}]")


_BIG = 2**31 - 1
# name, low, high, low excluded
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("n", 1, 16384, False),
    ("temperature", 0.0, 100.0, False),
    ("top_k", -1, _BIG, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 1000.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("max_tokens", 1, _BIG, False),
    ("min_tokens", 0, _BIG, False),
    ("logprobs", -1, _BIG, False),
    ("prompt_logprobs", -1, _BIG, False),
    ("seed", -(2**63), 2**64 - 1, False),
)
