"""The tokenizer in a GGUF file, as the library `tokenizers` has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from inflight.gguf.header import GgufError
from inflight.gguf.pre_tokenizers import PRE_TOKENIZERS

__all__ = ["make_tokenizer", "special_tokens", "stop_token_ids"]

_KEYS = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_MAX_TOKEN = 512  # characters; pieces are cut at each of them
_SPACE = "▁"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Control tokens that end an answer, whatever their names in the metadata; as llama.cpp has them.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "< EOT >"),
}
_WAY_OUT = 'set "tokenizer" in model.json to the hub id or the directory of the model\'s own'


def make_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """
    Raises:
        GgufError: it has none, or one of a kind that is not served.
    """
    kind = metadata.get(f"{_KEYS}model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise GgufError(f"its tokenizer is of the kind {kind!r:.40} (served: 'gpt2', 'llama'); {_WAY_OUT}")
    tokens = _tokens(metadata)
    try:
        made = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
        _add_tokens(made, metadata, tokens)
        _frame(made, metadata, tokens, _begins(metadata, kind))
    except GgufError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise GgufError(f"its tokenizer cannot be made: {' '.join(str(error).split())[:200]}; {_WAY_OUT}") from None
    return made


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts of BOS, EOS and others, by their names in tokenizer_config.json."""
    tokens = _tokens(metadata)
    found = {name: _id(metadata, f"{short}_token_id", len(tokens)) for name, short in _SPECIAL.items()}
    return {name: tokens[index] for name, index in found.items() if index is not None}


def stop_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer, EOS first."""
    tokens = metadata.get(f"{_KEYS}tokens")
    if not isinstance(tokens, list):
        return []
    named = [_id(metadata, f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
    control = [index for index in _of_type(metadata, tokens, _CONTROL) if tokens[index] in _ENDS]
    return list(dict.fromkeys(index for index in [*named, *control] if index is not None))


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(f"{_KEYS}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufError(f"it has no {_KEYS}tokens; {_WAY_OUT}")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise GgufError(f"{_KEYS}tokens has an entry of more than {_MAX_TOKEN} characters; {_WAY_OUT}")
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise GgufError(f"{_KEYS}tokens has {twice!r:.40} twice; {_WAY_OUT}")
    return tokens


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"{_KEYS}{name}")
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
    return value if is_id else None  # 2**32 - 1 and -1 mean that there is none


def _of_type(metadata: Mapping[str, Any], tokens: list[str], kind: int) -> Iterator[int]:
    types = metadata.get(f"{_KEYS}token_type")
    if not isinstance(types, np.ndarray):
        return iter(())
    if len(types) != len(tokens):
        raise GgufError(f"{_KEYS}token_type has {len(types)} entries, and there are {len(tokens)} tokens; {_WAY_OUT}")
    return (int(index) for index in np.flatnonzero(types == kind))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get(f"{_KEYS}pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        served = ", ".join(PRE_TOKENIZERS)
        raise GgufError(f"its text is cut as {_KEYS}pre={name!r:.40} says (served: {served}); {_WAY_OUT}")
    merges = metadata.get(f"{_KEYS}merges")
    if not isinstance(merges, list):
        raise GgufError(f"it has no {_KEYS}merges; {_WAY_OUT}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise GgufError(f"{_KEYS}merges has an entry that is no pair; {_WAY_OUT}")
    cut = PRE_TOKENIZERS[name]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut.whole_words))
    if cut.normalizer is not None:
        made.normalizer = cut.normalizer
    made.pre_tokenizer, made.decoder = cut.cuts, decoders.ByteLevel()
    return made


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Pieces are merged in the order of their scores; gemma's, whose scores say less, in the order of the file."""
    scores = metadata.get(f"{_KEYS}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens) or np.isnan(scores).any():
        raise GgufError(f"{_KEYS}scores are missing, or not one number a token; {_WAY_OUT}")
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:
        scores = -np.arange(len(tokens))
        tokens = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _id(metadata, "unknown_token_id", len(tokens)) or 0
    pieces = models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(pieces)
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma or metadata.get(f"{_KEYS}add_space_prefix", True) is False:
        made.normalizer = normalizers.Replace(" ", _SPACE)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        to_text.append(decoders.Strip(" ", 1, 0))
    if is_gemma:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(to_text)
    return made


def _merges(vocabulary: Mapping[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """All pairs of pieces that are a piece together, the highest score first."""
    pairs = [
        (-float(scores[index]), vocabulary[left], vocabulary[right], left, right)
        for piece, index in vocabulary.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocabulary and (right := piece[cut:]) in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_tokens(made: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Tokens that a text's pieces never become, and that are found in it before anything else."""
    special = [*_of_type(metadata, tokens, _CONTROL), *_of_type(metadata, tokens, _UNKNOWN)]
    made.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in special])
    whole = [tokens[index] for index in _of_type(metadata, tokens, _USER_DEFINED)]
    known = [token for token in whole if made.token_to_id(token) is not None]
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in known])


def _begins(metadata: Mapping[str, Any], kind: str) -> bool:
    if kind == "llama":
        return True
    return PRE_TOKENIZERS[metadata[f"{_KEYS}pre"]].begins


def _frame(made: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], begins: bool) -> None:
    """BOS and EOS around each text, as the file says."""
    bos = _id(metadata, "bos_token_id", len(tokens)) if metadata.get(f"{_KEYS}add_bos_token", begins) is True else None
    eos = _id(metadata, "eos_token_id", len(tokens)) if metadata.get(f"{_KEYS}add_eos_token") is True else None
    if bos is None and eos is None:
        return
    names = {index: f"<{index}>" for index in (bos, eos) if index is not None}
    before, after = ("" if index is None else names[index] for index in (bos, eos))
    made.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".split(),
        special_tokens=[{"id": name, "ids": [index], "tokens": [tokens[index]]} for index, name in names.items()],
    )
