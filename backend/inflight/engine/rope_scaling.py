"""The one choice that a rotary embedding makes for all tokens of a request.  No torch.

LongRoPE (arXiv:2402.13753) has one set of frequencies for sequences up to the length that a model was first trained
at, and another beyond; dynamic NTK scaling has one for each length beyond.  transformers chooses by the longest
position in the present batch.  Here the choice is the request's own: it is made when the request
arrives, by the length that its prompt and `max_tokens` allow, and holds for every token, in any batch, chunk, replay
or sequence of n.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from inflight.engine.attached import Attached

__all__ = ["RopeChoice"]


@dataclass(frozen=True)
class RopeChoice:
    """Implements `RequestChoice` for the frequencies of the rotary embedding.

    Attributes:
        limit: longest sequence that has the frequencies for short ones.
        of_each_length: dynamic NTK: every length beyond `limit` has its own frequencies; else all share one set.
        max_model_len: longest request.
    """

    limit: int
    of_each_length: bool
    max_model_len: int

    def length(self, num_prompt_tokens: int, max_tokens: int, longest: int | None = None) -> int:
        """The sequence length whose frequencies a request uses.

        The KV of its last token is never computed, so this token does not count; nor does `generate()` count it.
        """
        computed = min(num_prompt_tokens + max_tokens, longest or self.max_model_len) - 1
        if self.of_each_length:
            return max(computed, self.limit)
        return self.limit + 1 if computed > self.limit else self.limit

    def attach(self, attached: Attached, num_prompt_tokens: int, max_tokens: int) -> Attached:
        longest = self.max_model_len + (attached.pooling is not None)  # with a void token
        return msgspec.structs.replace(attached, rope_length=self.length(num_prompt_tokens, max_tokens, longest))

    def salt(self, attached: Attached) -> str:
        return str(attached.rope_length)
