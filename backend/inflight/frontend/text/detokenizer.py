"""Token ids to text, token by token.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"
_PARTIAL_TOKENS = 3  # an unfinished UTF-8 character has at most three bytes, each at most a token
_MAX_PENDING = 16  # tokens without text that are kept


class IncrementalDetokenizer:
    """Text of one output sequence, token by token.

    The joined chunks are `decode(prompt + output)` without `decode(prompt)`.  A chunk never
    ends inside a character: bytes are held back until they are complete, or until `flush()`.
    The window scheme is that of `tokenizers.decoders.DecodeStream`, which cannot flush, does not
    support slow tokenizers, and fails permanently if bytes of the output change the text before
    them ("invalid prefix").

    Args:
        prompt_token_ids: context for the first chunk, so that its leading space is right.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decode = tokenizer.decode_ids
        self._whole_texts = tokenizer.whole_texts
        self._concatenates = tokenizer.concatenates
        self._skip = skip_special_tokens
        self._window, self._prefix = self._context(prompt_token_ids)
        self._pending: list[int] = []

    def another(self) -> IncrementalDetokenizer:
        """A detokenizer for another output of the same prompt; call it before the first `push`."""
        other = copy(self)
        other._pending = []
        return other

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The shortest useful tail of the prompt, and its text."""
        for length in (6, 32, len(prompt)):
            tail = list(prompt[-length:]) if length else []
            text = self._decode(tail, self._skip)
            # A tail that ends inside a character has no stable text: start without context.
            if text.endswith(_REPLACEMENT):
                break
            if text or length >= len(prompt):
                return tail, text
        return [], ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; can be empty."""
        if self._concatenates and (known := self._known_text(token_ids)):
            return known
        self._pending += token_ids
        for held in range(min(_PARTIAL_TOKENS, len(self._pending)) + 1):
            text = self._decode(self._window + self._pending[: len(self._pending) - held], self._skip)
            if not text.endswith(_REPLACEMENT):
                break
        else:
            if len(self._pending) <= _PARTIAL_TOKENS:
                return ""  # the window itself ends in U+FFFD
        return self._emit(text, held)

    def _known_text(self, token_ids: Sequence[int]) -> str:
        """Push tokens of whole characters without a call of the library; "" if that cannot be."""
        if self._pending:
            return ""
        texts = [self._whole_texts[token_id] for token_id in token_ids]
        if not texts or not all(texts):
            return ""
        self._window, self._prefix = [token_ids[-1]], texts[-1]
        return "".join(texts)

    def push_each(self, token_ids: Sequence[int]) -> str:
        """The text of pushing each of these tokens alone, usually with the work of one push.

        How tokens are grouped matters only where bytes are no character, or not a complete one.
        """
        if self._concatenates and (known := self._known_text(token_ids)):
            return known
        texts = [self._whole_texts[token_id] for token_id in token_ids]
        if all(texts) and not self._pending:
            text = self._decode([*self._window, *token_ids], self._skip)
            chunk = text[len(self._prefix) :]
            if chunk and _REPLACEMENT not in chunk:
                self._window, self._prefix = [token_ids[-1]], texts[-1]
                return chunk
        return "".join([self.push([token_id]) for token_id in token_ids])

    def flush(self) -> str:
        """The text of the bytes that are held back; incomplete characters become U+FFFD."""
        return self._emit(self._decode(self._window + self._pending, self._skip), 0)

    def _emit(self, text: str, held: int) -> str:
        """The new part of `text`, which is the text of all but the last `held` tokens."""
        chunk = text[len(self._prefix) :]
        if chunk:
            split = len(self._pending) - held
            self._window, self._pending = self._pending[:split], self._pending[split:]
            self._prefix = self._text_of_window()
        elif len(self._pending) > _MAX_PENDING:  # a run of skipped special tokens
            self._pending = self._pending[-_PARTIAL_TOKENS:]
        return chunk

    def _text_of_window(self) -> str:
        """The window's text, without decoding it again if it is one token of whole characters, as it mostly is."""
        text = self._whole_texts[self._window[0]] if len(self._window) == 1 else ""
        return text or self._decode(self._window, self._skip)
