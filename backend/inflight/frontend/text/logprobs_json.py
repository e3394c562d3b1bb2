"""Log probabilities in vllm_backend's JSON format, written without a Python object per entry.

For each token an object of token id -> logprob, rank, text; null for a token without log probabilities:

    [{"17": {"logprob": -0.5, "rank": 1, "decoded_token": " the"}}, null]

The text is identical to the output of `json.dumps` for such objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat

import msgspec
import numpy as np

from inflight.engine.logprobs import Logprobs
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["entry_texts", "joined_texts"]

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's servers write this instead
_PLAIN = (1e-4, 1e15)  # other numbers are written with an exponent, which differs between the two encoders

_encode = msgspec.json.Encoder().encode


def entry_texts(logprobs: Logprobs, tokenizer: Tokenizer | None) -> list[str]:
    """The JSON of each token; without a tokenizer the texts are null."""
    arrays = logprobs.arrays()
    ids, ranks = arrays[0].tolist(), arrays[2].tolist()
    token_texts = repeat("null") if tokenizer is None else map(tokenizer.json_texts.__getitem__, ids)
    triples = [
        f'"{token_id}": {{"logprob": {value}, "rank": {rank}, "decoded_token": {text}}}'
        for token_id, value, rank, text in zip(ids, _numbers(arrays[1]), ranks, token_texts)
    ]
    texts = []
    for start, end in pairwise([0, *accumulate(logprobs.counts)]):
        if start == end:
            texts.append("null")
            continue
        entry = triples[start:end]
        if ids[start] in ids[start + 1 : end]:  # the token is one of the most likely
            entry[0] = entry.pop(ids.index(ids[start], start + 1) - start)
        texts.append(f"{{{', '.join(entry)}}}")
    return texts


def joined_texts(texts: Sequence[str]) -> str:
    """The JSON of several tokens."""
    return f"[{', '.join(texts)}]"


def _numbers(values: np.ndarray) -> list[str]:
    """float32 -> as `json.dumps` writes them."""
    if not len(values):
        return []
    finite = np.where(np.isfinite(values), values, np.float32(_LOWEST_LOGPROB)).astype(np.float64)
    texts = _encode(finite.tolist()).decode("ascii")[1:-1].split(",")
    sizes = np.abs(finite)
    for place in np.flatnonzero(((sizes < _PLAIN[0]) & (sizes > 0)) | (sizes > _PLAIN[1])).tolist():
        texts[place] = repr(float(finite[place]))
    return texts
