"""Limits of one request: the `max_*` keys of `model.json` that concern requests.  No torch, no Triton.

Each cost of a request is bounded by a limit, or shared in turns with other requests;
docs/operations/fair-shares.md lists both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import shown

__all__ = ["LimitError", "Limits"]

# The tail of the text is compared with a stop string again and again while it can be its beginning.
_MAX_STOP_CHARS = 4096


class LimitError(ValueError):
    """A request exceeds a limit; the message says by how much, and names the key of model.json."""


class Limits:
    """The limits of a model.

    Args:
        config: its `max_*` keys.
        vocab_size: of the loaded checkpoint.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._max_logprobs = vocab_size if config.max_logprobs == -1 else config.max_logprobs

    def check_params(self, params: SamplingParams) -> None:
        """Raises LimitError: too many sequences or log probabilities."""
        self._check(params.n, "max_n", f"n={params.n}")
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            if given is not None and (self._vocab_size if given == -1 else given) > self._max_logprobs:
                raise LimitError(_message(f"{name}={given}", self._max_logprobs, "max_logprobs"))

    def check_lists(self, values: Mapping[str, Any]) -> None:
        """Raises LimitError: too many or too long `stop` or `bad_words`, or too many `stop_token_ids`.

        Args:
            values: sampling key -> converted value.
        """
        for name, key in (("stop", "max_stop_strings"), ("bad_words", "max_bad_words")):
            texts: Sequence[str] = values.get(name) or ()
            self._check(len(texts), key, f"{name} has {len(texts)} strings")
            size = sum(len(text.encode()) for text in texts)
            self._check(size, "max_stop_bytes", f"the strings of {name} have {size} bytes")
            longest = max(texts, key=len, default="")
            if len(longest) > _MAX_STOP_CHARS:
                raise LimitError(
                    f"{name} contains a string of {len(longest)} characters, {shown(longest)}: "
                    f"at most {_MAX_STOP_CHARS} are allowed"
                )
        ids = values.get("stop_token_ids") or ()
        self._check(len(ids), "max_stop_token_ids", f"stop_token_ids has {len(ids)} token ids")

    def check_inputs(self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> None:
        """Raises LimitError: an input tensor or a request parameter is too large."""
        sizes = {name: _num_bytes(array) for name, array in inputs.items()}
        sizes |= {name: len(value) for name, value in parameters.items() if isinstance(value, str)}
        for name, size in sizes.items():
            self._check(size, "max_input_bytes", f"{shown(name)[1:-1]} has {size} bytes")

    def check_name(self, name: str, text: str) -> str:
        """Returns `text`, a name that the client chose; raises LimitError if it is too long."""
        size = len(text.encode(errors="surrogatepass"))
        self._check(size, "max_name_bytes", f"{name} has {size} bytes")
        return text

    def _check(self, given: int, key: str, said: str) -> None:
        allowed: int = getattr(self._config, key)
        if given > allowed:
            raise LimitError(_message(said, allowed, key))


def _message(said: str, allowed: int, key: str) -> str:
    return f"{said}: at most {allowed} are allowed ({key} in model.json)"


def _num_bytes(array: np.ndarray) -> int:
    return sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes
