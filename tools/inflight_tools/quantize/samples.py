"""Text for the inputs of layers: what the model itself writes, or a file of the user's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from inflight import LLM, SamplingParams
from inflight.config import ConfigError
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.in_process.prompts import read_chat
from inflight.loading.load_errors import LoadError
from inflight_tools.quantize.refused import Refused
from inflight_tools.quantize.source import Source

__all__ = ["Wanted", "samples_of"]

_MARK = "INFLIGHT"  # where the user's message begins in a rendered chat
_MOST_AT_ONCE = 32
_SHORTEST = 32  # tokens of a text: fewer say little about any input


@dataclass(frozen=True)
class Wanted:
    """
    Attributes:
        count, length: samples, and tokens of each.
        text: a file to take them from, instead of the model.
    """

    count: int
    length: int
    seed: int
    text: Path | None = None


def samples_of(source: Source, wanted: Wanted) -> list[list[int]]:
    """Token ids of each sample.

    Raises:
        Refused: the file cannot be read or is too short, or the model cannot be loaded to write.
    """
    if wanted.length > source.max_length:
        raise Refused(
            f"--sample-tokens {wanted.length}: {source.folder} takes at most {source.max_length} tokens; lower it"
        )
    return _written(source, wanted) if wanted.text is None else _read(source, wanted, wanted.text)


def _read(source: Source, wanted: Wanted, text: Path) -> list[list[int]]:
    """Parts of a file, evenly distributed over it; all of it if it has no more."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--text {text} cannot be read as UTF-8: {error}") from None
    tokenizer = Tokenizer.load(str(source.folder), required=False)
    try:
        ids = tokenizer.encode(content, add_special_tokens=False)
    except ValueError as error:
        raise Refused(f"--text {text} cannot be tokenised: {error}") from None
    if len(ids) < _SHORTEST:
        raise Refused(f"--text {text} has {len(ids)} tokens: give at least {_SHORTEST}, better some thousands")
    if len(ids) <= wanted.count * wanted.length:
        return [ids[start : start + wanted.length] for start in range(0, len(ids), wanted.length)]
    last = len(ids) - wanted.length
    starts = [last * index // max(1, wanted.count - 1) for index in range(wanted.count)]
    return [ids[start : start + wanted.length] for start in starts]


def _written(source: Source, wanted: Wanted) -> list[list[int]]:
    """Samples begin in turn as documents do, and as the user's message in a chat; the model goes on from there."""
    options: dict[str, Any] = dict(max_num_seqs=min(wanted.count, _MOST_AT_ONCE), max_model_len=wanted.length + 1)
    try:
        with _nothing_kept(), _no_line_of_its_own(), LLM(str(source.folder), device="cpu", **options) as llm:
            starts = [start[: wanted.length - 1] for start in _starts(llm, source, wanted)]
            params = [
                SamplingParams(
                    seed=wanted.seed + index, ignore_eos=True, detokenize=False, max_tokens=wanted.length - len(start)
                )
                for index, start in enumerate(starts)
            ]
            answers = llm.generate(starts, params, use_tqdm=False)
    except (ConfigError, LoadError) as error:
        raise Refused(f"the model cannot be loaded to write samples: {error}; or give --text") from error
    return [[*start, *answer.outputs[0].token_ids] for start, answer in zip(starts, answers)]


def _starts(llm: LLM, source: Source, wanted: Wanted) -> list[list[int]]:
    """The first tokens of each sample."""
    config = source.config
    first = config.get("bos_token_id", config.get("eos_token_id"))
    if first is None:
        first = config.get("eos_token_id")
    first = first[0] if isinstance(first, list) and first else first
    chat, random = _chat_start(llm), Random(wanted.seed)
    size = source.model.get_input_embeddings().num_embeddings
    starts = []
    for index in range(wanted.count):
        document = [first if isinstance(first, int) else random.randrange(size)]
        starts.append(chat if chat and index % 2 else document)
    return starts


def _chat_start(llm: LLM) -> list[int]:
    """Of a chat, up to the user's first message; [] if the model has no chat template."""
    conversation = [{"role": "user", "content": _MARK}]
    try:
        text, _ = read_chat(conversation, {"add_generation_prompt": True}, llm.engine.chat_template(), llm.tokenizer)
        before, found, _ = text.partition(_MARK)
        return llm.tokenizer.encode(before, add_special_tokens=False) if found else []
    except ValueError:  # no template, or one that takes no message like this
        return []


@contextmanager
def _no_line_of_its_own() -> Iterator[None]:
    """An engine in the block shows no phases of its load: `Shown` has the terminal, or nothing is wanted there."""
    log = logging.getLogger("inflight.load_phases")
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)  # the program takes the messages
    log.propagate = False
    try:
        yield
    finally:
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """An engine in the block keeps no weights for its next start: the next one loads the quantized checkpoint."""
    name = "INFLIGHT_CACHE"
    before = os.environ.get(name)
    os.environ[name] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
