"""Text prompts with exact or rough token counts; for token ids see `inflight_tools.workload.prompts`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from inflight_tools.workload.prompts import HASH_BLOCK
from inflight_tools.workload.scenarios import Job
from loadtest.errors import LoadTestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextPrompts", "WordPrompts", "load_tokenizer"]

_TEXT = (
    "time people way water words number sound place year work part name help line before turn cause same mean "
    "differ move right boy old great read port spell add land here must big high follow act ask change light "
    "kind off need house picture try us again animal point mother world near build self earth"
)
_WORDS = _TEXT.split()
_FILLERS = (" a", " 1", ".", ",", "!", "x", "0", " (", "\n", "-", "~", "e")
_MAX_ROUNDS = 64


class TextPrompts:
    """English words that `tokenizer` turns into an exact number of tokens, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        sample = " ".join(_WORDS)
        self._per_word = self.count(sample) / len(_WORDS)

    def count(self, text: str) -> int:
        """Number of tokens in `text` as the server counts them."""
        return len(self._tokenizer.encode(text).ids)

    def make(self, job: Job) -> str:
        """Text of exactly `job.prompt_tokens` tokens, whose beginning it shares with others as `job.hash_ids` says.

        Blocks that are shared have about 512 tokens.

        Raises:
            LoadTestError: no such text was found (such as for fewer tokens than the special ones alone).
        """
        wanted = job.prompt_tokens
        rng = np.random.default_rng([self._seed, job.index, 4])
        words = [word for block in job.hash_ids for word in self._block(block)]
        words += [_WORDS[at] for at in rng.integers(0, len(_WORDS), wanted + 8)]
        number = self._fitting_words(words, wanted)
        text = " ".join(words[:number])
        for _ in range(_MAX_ROUNDS):
            missing = wanted - self.count(text)
            if missing == 0:
                return text
            longer = (text + filler for filler in _FILLERS)
            # A filler can merge with the text before it: take the first one that adds exactly one token.
            found = next((some for some in longer if self.count(some) == wanted - missing + 1), None)
            if found is None:
                break
            text = found
        raise LoadTestError(f"no text of exactly {wanted} tokens found with this tokenizer; use --prompt ids")

    def _block(self, number: int) -> list[str]:
        rng = np.random.default_rng([self._seed, number, 5])
        return [_WORDS[at] for at in rng.integers(0, len(_WORDS), int(HASH_BLOCK / self._per_word))]

    def _fitting_words(self, words: list[str], wanted: int) -> int:
        """Number of the first words that fit into `wanted` tokens."""
        low, high = 0, min(len(words), int(wanted / self._per_word * 1.5) + 8)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(" ".join(words[:middle])) <= wanted:
                low = middle
            else:
                high = middle - 1
        return low


class WordPrompts:
    """As many common English words as a request has prompt tokens, for servers with an unknown tokenizer.

    Nearly all tokenizers have a token for each of these words.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def make(self, job: Job) -> str:
        """The words; equal hash ids give equal blocks of 512."""
        words = [word for block in job.hash_ids for word in self._draw([self._seed, block, 5], HASH_BLOCK)]
        words += self._draw([self._seed, job.index, 4], max(0, job.prompt_tokens - len(words)))
        return " ".join(words[: job.prompt_tokens])

    def _draw(self, key: list[int], count: int) -> list[str]:
        return [_WORDS[at] for at in np.random.default_rng(key).integers(0, len(_WORDS), count)]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a checkpoint folder.

    Raises:
        LoadTestError: it has no `tokenizer.json`, or the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LoadTestError("tokenizers not found; --prompt text needs it: pip install tokenizers") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LoadTestError(f"{path}: no such file; --tokenizer must be a checkpoint folder with a tokenizer.json")
    return Tokenizer.from_file(str(path))
