"""The prompt of a request -> token ids.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.frontend.chat.chat_template import ChatTemplate, ChatTemplateError
from inflight.frontend.errors import RequestError
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["PROMPTS", "PromptReader"]

PROMPTS = ("text_input", "input_ids", "messages")


class PromptReader:
    """Finds, renders, tokenises, truncates and checks the prompt of a request.

    Args:
        max_model_len, vocab_size: of the loaded checkpoint.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def read(self, inputs: Mapping[str, Any], truncate: int | None = None) -> tuple[list[int], str]:
        """Token ids, and their text ("" for `input_ids`).

        Args:
            truncate: keep at most this many tokens, the last ones; -1: as many as fit; None: all.

        Raises:
            TokenizerError: a text, and the checkpoint has no tokenizer.
            RequestError: INVALID_ARG; not exactly one prompt, no tokens, too many tokens, or unknown ids.
        """
        given = [name for name in PROMPTS if inputs.get(name)]
        if not given and inputs.get("text_input") == "":
            given = ["text_input"]  # the start token alone, if the tokenizer adds one
        if len(given) != 1:
            got = " and ".join(given) or "no prompt or an empty one"
            raise RequestError("INVALID_ARG", f"got {got}: give exactly one of {', '.join(PROMPTS)}, not empty")
        limit = None if truncate is None else self._truncation(truncate)
        value = inputs[given[0]]
        if given[0] == "input_ids":
            return self._checked(value if limit is None else value[-limit:]), ""
        text = value if given[0] == "text_input" else self._render(value)
        token_ids, _ = self._tokenise(text, limit, add_special_tokens=given[0] == "text_input")
        if not token_ids:
            raise RequestError(
                "INVALID_ARG", f"{given[0]} is empty, and the tokenizer adds no start token: give at least one token"
            )
        return self._checked(token_ids), text

    def tokens(
        self, inputs: Mapping[str, Any], add_special_tokens: bool, truncate: int | None = None
    ) -> tuple[list[int], str]:
        """Token ids of `text_input` or `messages`, and the text that they have without added special tokens.

        Without `truncate` (as in `read`) they can be more than a request can have.

        Raises:
            TokenizerError, RequestError: as `read`.
        """
        text = inputs["text_input"] if "text_input" in inputs else self._render(inputs["messages"])
        limit = None if truncate is None else self._truncation(truncate)
        token_ids, kept = self._tokenise(text, limit, add_special_tokens)
        return token_ids, text if kept is None else self._tokenizer.decode_all(kept)

    def _truncation(self, given: int) -> int:
        if given == -1:
            return self._max_model_len - 1
        if not 1 <= given <= self._max_model_len:
            raise RequestError(
                "INVALID_ARG",
                f"truncate_prompt_tokens={given}: must be 1 to {self._max_model_len}, or -1 for what fits",
            )
        return given

    def _tokenise(self, text: str, limit: int | None, add_special_tokens: bool) -> tuple[list[int], list[int] | None]:
        """Token ids, and those of them that come from the text; None: all of the text is kept.

        A truncated prompt keeps the special tokens at its ends and the last of the others.
        """
        self._tokenizer.check_texts([text])
        longest = self._tokenizer.longest_token
        if limit is None:
            most = self._max_model_len - 1
            if len(text) > most * longest:  # do not tokenise what cannot fit
                raise RequestError(
                    "INVALID_ARG", f"the prompt has {len(text)} characters, which must be more than {most} tokens"
                )
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens), None
        # The kept tokens reach back `limit * longest` characters at most; as many before them are context.
        text = text[-2 * limit * longest :]
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if len(token_ids) <= limit:
            return token_ids, None
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        num_special = len(token_ids) - len(plain)
        starts = [k for k in range(num_special + 1) if token_ids[k : k + len(plain)] == plain]
        if not starts or limit <= num_special:
            return token_ids[-limit:], token_ids[-limit:]
        first, last = token_ids[: starts[0]], token_ids[starts[0] + len(plain) :]
        kept = plain[num_special - limit :]
        return [*first, *kept, *last], kept

    def _render(self, chat: str) -> str:
        try:
            return self._chat.render(chat)
        except ChatTemplateError as error:
            raise RequestError("INVALID_ARG", f"messages: {error}") from None

    def _checked(self, ids: list[int]) -> list[int]:
        limit = self._max_model_len - 1
        if not 1 <= len(ids) <= limit:
            raise RequestError(
                "INVALID_ARG",
                f"the prompt has {len(ids)} tokens: it must be 1 to {limit} long "
                f"(max_model_len={self._max_model_len} minus one output token)",
            )
        self.check_ids(ids)
        return ids

    def check_ids(self, ids: list[int]) -> None:
        """Raise RequestError for ids outside the vocabulary."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                "INVALID_ARG", f"input_ids: token id {bad} is not in the vocabulary [0, {self._vocab_size - 1}]"
            )
