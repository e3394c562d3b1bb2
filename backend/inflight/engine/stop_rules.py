"""The rules by which tokens end a sequence.  Both the engine and the frontend, which reads resumed output, apply them.

Pure functions, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.engine.sampling_params import SamplingParams

__all__ = ["max_total_tokens", "stop_ids"]


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Token ids that end a sequence; `eos_token_ids` are the checkpoint's."""
    ignores_eos = params.ignore_eos and params.grammar is None  # a grammar masks EOS while there is a choice
    return frozenset(params.stop_token_ids).union(() if ignores_eos else eos_token_ids)


def max_total_tokens(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens of the prompt and the longest output together, for each of the n sequences."""
    return min(num_prompt_tokens + params.max_tokens, max_model_len)
