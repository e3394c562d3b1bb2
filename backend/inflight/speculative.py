"""`speculative_config` of a `model.json`: the keys are vLLM's.  No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["SpeculativeConfig"]

_DRAFT_TOKENS = 8
_Count = Annotated[int, Meta(ge=1, le=2**20)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of drafts, and their maximum length; the engine chooses the length in every step.

    Attributes:
        method: "suffix" copies what followed the longest earlier occurrence of the last tokens, in the request's own
            prompt and output and in past outputs; "ngram" searches the request alone; "draft_model" runs `model`, and
            is the default if `model` is set.
        model: of "draft_model": directory, GGUF file or hub id of a checkpoint with the same tokenizer.
        revision: of `model`: hub revision.
        kv_cache_memory: of "draft_model": size of its own KV pool; requests without room in it have no drafts.
        num_speculative_tokens: maximum number of draft tokens of a sequence in one step; `None`:
            `suffix_decoding_max_tree_depth` for "suffix", else 8.
        prompt_lookup_min, prompt_lookup_max: of "ngram": minimum and maximum number of tokens of a match.
        suffix_decoding_max_tree_depth: of "suffix": maximum number of tokens of a match, and of a draft.
        suffix_decoding_max_cached_requests: of "suffix": number of past outputs to search; 0: none, so no request
            depends on the output of another one.
        suffix_decoding_max_spec_factor: of "suffix": a draft is at most this many times as long as its match.
        suffix_decoding_min_token_prob: of "suffix": a draft ends before a token that is less probable than this.
    """

    method: Literal["suffix", "ngram", "draft_model"] | None = None
    model: str | None = None
    revision: str | None = None
    kv_cache_memory: Annotated[int, Meta(gt=0)] | str = "1GiB"
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=256)] | None = None
    prompt_lookup_min: _Count = 2
    prompt_lookup_max: _Count = 5
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=2**20)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0.1, le=256)] = 8.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1

    @property
    def longest_draft(self) -> int:
        """Maximum number of draft tokens of a sequence in one step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return self.suffix_decoding_max_tree_depth if self.method == "suffix" else _DRAFT_TOKENS

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            raise ValueError('neither method nor model is set; set method to "suffix", or model to a small checkpoint')
        if self.method in ("suffix", "ngram") and self.model is not None:
            raise ValueError(f"method={self.method!r} has no model; remove one of them")
        if self.method == "draft_model" and self.model is None:
            raise ValueError('method="draft_model" needs model: a small checkpoint with the same tokenizer')
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}; "
                "lower it"
            )
