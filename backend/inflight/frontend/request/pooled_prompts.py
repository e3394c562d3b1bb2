"""Texts to embed, score or classify -> the prompts that the engine computes, and its vectors -> results.

No torch, no Triton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from inflight.config import EngineConfig
from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.pooler_facts import PoolerFacts
from inflight.engine.pooling import Pooling
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["Asked", "PooledPlan", "PooledPrompts", "most_inputs"]

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SIDES = ("left", "right")


@dataclass(frozen=True)
class Asked:
    """A request for vectors.

    Attributes:
        task: "embed", "score" or "classify".
        inputs: each a text or token ids; of "score", a pair of texts.
        dimensions: size to which embeddings are cut; None: not cut.
        normalize: None: as the checkpoint does.
        truncate: most tokens of a prompt, -1 for as many as fit; None: a longer one is an error.
        side: the one that is cut off.
        instruction: of the query of a pair, or in front of each text to embed; the name of a prompt of the checkpoint,
            or a text.
        raw_scores: leave out softmax or sigmoid.
    """

    task: str
    inputs: Sequence[Any]
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: int | None = None
    side: str = "right"
    instruction: str | None = None
    raw_scores: bool = False


@dataclass(frozen=True)
class PooledPlan:
    """The prompts of a request for vectors.

    Attributes:
        prompts: token ids of each; at least one.
        pooling: of all of them.
        pairs: the two prompts of each input, whose vectors are compared; None: each prompt is an input.
        labels: of the numbers of a vector of classes; else empty.
        second_starts: of each prompt with a pair of texts, see `Attached`; empty: no prompt has one.
    """

    prompts: list[list[int]]
    pooling: Pooling
    pairs: list[tuple[int, int]] | None
    labels: list[str]
    second_starts: list[int] = field(default_factory=list)

    def attached(self, prompt: int, adapter: AdapterRef | None = None, traced: bool = False) -> Attached:
        """The data that travels with a prompt."""
        start = self.second_starts[prompt] if self.second_starts else 0
        return Attached(traced=traced, pooling=self.pooling, adapter=adapter, second_start=start)

    @property
    def counts(self) -> list[int]:
        """Prompt tokens of each input."""
        lengths = [len(prompt) for prompt in self.prompts]
        return lengths if self.pairs is None else [lengths[one] + lengths[other] for one, other in self.pairs]

    def inputs_of(self, prompt: int) -> int:
        """The first input that a prompt belongs to."""
        return prompt if self.pairs is None else next(i for i, pair in enumerate(self.pairs) if prompt in pair)

    def results(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [inputs, D] of the float32 [D] of each prompt."""
        table = np.stack(vectors)
        if self.pairs is None:
            return table
        one, other = (table[[pair[side] for pair in self.pairs]] for side in (0, 1))
        return (one * other).sum(axis=1, keepdims=True, dtype=np.float32)


class PooledPrompts:
    """Checks and tokenises what is to be embedded, scored or classified.

    Args:
        facts: of the checkpoint.
        max_model_len, vocab_size: likewise; a prompt can be `max_model_len` tokens long.
        max_inputs: in one request.
        max_input_bytes: of a request's instruction, counted once for each input.
    """

    def __init__(
        self,
        facts: PoolerFacts,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        max_inputs: int,
        max_input_bytes: int,
    ) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_inputs = max_inputs
        self._max_input_bytes = max_input_bytes

    def plan(self, asked: Asked) -> PooledPlan:
        """Raises RequestError (INVALID_ARG): the message names the input that cannot be served, and why."""
        self._check(asked)
        facts, task = self.facts, asked.task
        limit = self._limit(asked.truncate)
        is_cosine = task == "score" and facts.pairs == "cosine"
        normalizes = facts.normalizes if asked.normalize is None else asked.normalize
        pooling = Pooling(
            task="embed" if is_cosine else task,
            kind=facts.kind,
            activates=is_cosine or (normalizes if task == "embed" else not asked.raw_scores),
            dimensions=asked.dimensions or 0,
        )
        if is_cosine:
            return self._cosine(asked, limit, pooling)
        if task == "score":
            pairs = [_named(i, self._pair, entry, asked, limit) for i, entry in enumerate(asked.inputs)]
            prompts, starts = [token_ids for token_ids, _ in pairs], [start for _, start in pairs]
            return PooledPlan(prompts, pooling, None, [], starts)
        prompts = [_named(i, self._single, entry, asked, limit) for i, entry in enumerate(asked.inputs)]
        return PooledPlan(prompts, pooling, None, facts.labels if task == "classify" else [])

    def _cosine(self, asked: Asked, limit: int | None, pooling: Pooling) -> PooledPlan:
        """Each distinct text is embedded once; an instruction is for the first texts of pairs, the queries."""
        found: dict[tuple[str, bool], int] = {}
        prompts: list[list[int]] = []
        pairs = []
        plain = Asked("embed", (), side=asked.side)
        instructed = Asked("embed", (), side=asked.side, instruction=asked.instruction)
        for i, entry in enumerate(asked.inputs):
            places = []
            for text, how in zip(_named(i, _pair_of, entry), (instructed, plain)):
                key = text, how.instruction is not None
                if key not in found:
                    found[key] = len(prompts)
                    prompts.append(_named(i, self._single, text, how, limit))
                places.append(found[key])
            pairs.append((places[0], places[1]))
        return PooledPlan(prompts, pooling, pairs, [])

    def _check(self, asked: Asked) -> None:
        facts, task = self.facts, asked.task
        if task not in facts.tasks:
            has = f"it has {', '.join(facts.tasks)}" if facts.tasks else f"{facts.lacking or 'it has none'}"
            if task == "score" and facts.labels:
                has += f"; a score needs one label, and it has {len(facts.labels)}"
            raise RequestError("INVALID_ARG", f"task={shown(task)}: not a task of this checkpoint: {has}")
        if not asked.inputs:
            raise RequestError("INVALID_ARG", "inputs is empty: give at least one")
        if len(asked.inputs) > self._max_inputs:
            raise RequestError(
                "INVALID_ARG",
                f"inputs has {len(asked.inputs)} entries: at most {self._max_inputs} are allowed (the lesser of "
                "max_pooled_inputs, and max_num_seqs + max_queue_size, in model.json)",
            )
        for name, given in (("dimensions", asked.dimensions), ("normalize", asked.normalize)):
            if given is not None and task != "embed":
                raise RequestError("INVALID_ARG", f'{name}={shown(given)}: only for task "embed"')
        if asked.raw_scores and task == "embed":
            raise RequestError("INVALID_ARG", 'raw_scores: not for task "embed"; see normalize')
        if asked.side not in _SIDES:
            raise RequestError("INVALID_ARG", f'truncation_side={shown(asked.side)}: must be "left" or "right"')
        if asked.instruction is not None and (task == "classify" or (task == "score" and facts.pairs == "tokenizer")):
            raise RequestError("INVALID_ARG", f"instruction: this checkpoint's {task} takes none; leave it out")
        self._check_instruction(asked.instruction or "", len(asked.inputs))
        self._check_dimensions(asked.dimensions)

    def _check_instruction(self, given: str, count: int) -> None:
        """One that is sent once is tokenised with every input."""
        size = len(given.encode(errors="surrogatepass"))
        if size * count > self._max_input_bytes:
            raise RequestError(
                "INVALID_ARG",
                f"instruction has {size} bytes, {size * count} for {count} inputs: at most {self._max_input_bytes} are "
                "allowed (max_input_bytes in model.json); send a shorter one, or fewer inputs at once",
            )

    def _check_dimensions(self, given: int | None) -> None:
        if given is None:
            return
        facts = self.facts
        if facts.matryoshka is None and given != facts.size:
            raise RequestError(
                "INVALID_ARG",
                f"dimensions={given}: this checkpoint's embeddings have {facts.size} numbers, and it is no matryoshka "
                'model, so they cannot be cut; if it is, set "hf_overrides": {"is_matryoshka": true} in model.json',
            )
        if facts.matryoshka and given not in facts.matryoshka:
            allowed = ", ".join(map(str, facts.matryoshka))
            raise RequestError("INVALID_ARG", f"dimensions={given}: must be one of {allowed}")
        if not 1 <= given <= facts.size:
            raise RequestError("INVALID_ARG", f"dimensions={given}: must be 1 to {facts.size}")

    def _limit(self, truncate: int | None) -> int | None:
        most = self._max_model_len
        if truncate is None or truncate == -1:
            return None if truncate is None else most
        if not 1 <= truncate <= most:
            raise RequestError(
                "INVALID_ARG", f"truncate_prompt_tokens={truncate}: must be 1 to {most}, or -1 for what fits"
            )
        return truncate

    def _single(self, entry: Any, asked: Asked, limit: int | None) -> list[int]:
        """Token ids of a text or of token ids."""
        if isinstance(entry, str):
            text = entry
            if not text:
                raise ValueError("an empty text: give at least one character")
            if asked.instruction is not None:
                text = self.facts.prompts.get(asked.instruction, asked.instruction) + text
            return self._checked(self._text(text, asked.side, limit))
        if not isinstance(entry, list) or not all(type(each) is int for each in entry):
            raise ValueError(f"{shown(entry)}: must be a string or a list of token ids")
        if asked.instruction is not None:
            raise ValueError("token ids take no instruction: put its tokens before them")
        if not entry:
            raise ValueError("no token ids: give at least one")
        return self._checked(_cut(entry, asked.side, limit))

    def _text(self, text: str, side: str, limit: int | None) -> list[int]:
        text = self._bounded(text.lower() if self.facts.lowers else text, side, limit)
        token_ids = self._tokenizer.encode(text)
        if limit is None or len(token_ids) <= limit:
            return token_ids
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        first, last = _around(token_ids, plain)
        room = limit - len(first) - len(last)
        return [*first, *_cut(plain, side, room), *last] if room > 0 else _cut(token_ids, side, limit)

    def _bounded(self, text: str, side: str, limit: int | None) -> str:
        """The part of a text that can matter: what cannot fit is not tokenised."""
        text.encode("utf-8")  # an unpaired surrogate is a ValueError
        most = self._max_model_len if limit is None else limit
        longest = self._tokenizer.longest_token
        if limit is None and len(text) > most * longest:
            raise ValueError(
                f"a text of {len(text)} characters, which must be more than {most} tokens; set truncate_prompt_tokens"
            )
        if limit is None:
            return text
        reach = 2 * most * longest  # as much again as the kept tokens can reach is context
        return text[:reach] if side == "right" else text[-reach:]

    def _pair(self, entry: Any, asked: Asked, limit: int | None) -> tuple[list[int], int]:
        """Token ids of one prompt with a query and a document, whose end is cut; and where the document starts."""
        query, document = _pair_of(entry)
        if self.facts.lowers:
            query, document = query.lower(), document.lower()
        if self.facts.pairs == "tokenizer":
            if limit is None:
                self._bounded(query + document, "right", None)
            else:
                query, document = (self._bounded(text, "right", limit) for text in (query, document))
            token_ids, start = self._tokenizer.encode_pair(query, document)
            if limit is not None and len(token_ids) > limit:
                token_ids = self._shorter_pair(token_ids, document, limit)
            return self._checked(token_ids), start
        before, after = self._frame
        texts = {"instruction": asked.instruction or _INSTRUCTION, "query": query, "document": document}
        body = re.sub(r"\{(instruction|query|document)\}", lambda found: texts[found[1]], self.facts.template[1])
        body = self._bounded(body, asked.side, limit)
        middle = self._tokenizer.encode(body, add_special_tokens=False)
        room = None if limit is None else limit - len(before) - len(after)
        if room is not None and room < 1:
            raise ValueError(f"truncate_prompt_tokens leaves no room beside the template's {limit and limit - room}")
        return self._checked([*before, *_cut(middle, asked.side, room), *after]), 0

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        before, _, after = self.facts.template
        return self._tokenizer.encode(before, add_special_tokens=False), self._tokenizer.encode(
            after, add_special_tokens=False
        )

    def _shorter_pair(self, token_ids: list[int], document: str, limit: int) -> list[int]:
        """The pair with fewer tokens of its document, which is tokenised apart from the query."""
        own = self._tokenizer.encode(document, add_special_tokens=False)
        kept = len(own) - (len(token_ids) - limit)
        behind = range(len(token_ids) - len(own), -1, -1) if kept > 0 else ()
        start = next((k for k in behind if token_ids[k] == own[0] and token_ids[k : k + len(own)] == own), None)
        if start is None:
            raise ValueError(f"truncate_prompt_tokens={limit} leaves no room for the second text")
        return [*token_ids[: start + kept], *token_ids[start + len(own) :]]

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not 1 <= len(token_ids) <= self._max_model_len:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens: it must be 1 to {self._max_model_len} long (max_model_len); set "
                "truncate_prompt_tokens to cut it"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is not in the vocabulary [0, {self._vocab_size - 1}]"
            )
        return token_ids


def most_inputs(config: EngineConfig) -> int:
    """Inputs that a request can have: each is a sequence that waits or runs."""
    most = config.max_pooled_inputs
    return min(most, config.max_num_seqs + config.max_queue_size) if config.max_queue_size else most


def _pair_of(entry: Any) -> tuple[str, str]:
    is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
    if not is_pair or not all(isinstance(text, str) and text for text in entry):
        raise ValueError(f"{shown(entry)}: must be a pair of texts, [query, document], neither of them empty")
    query, document = entry
    return query, document


def _named(index: int, read: Callable[..., Any], *values: Any) -> Any:
    """The result of `read`; its error names the input."""
    try:
        return read(*values)
    except (ValueError, TokenizerError) as error:
        raise RequestError("INVALID_ARG", f"inputs[{index}]: {error}") from None


def _cut(token_ids: list[int], side: str, limit: int | None) -> list[int]:
    if limit is None or len(token_ids) <= limit:
        return token_ids
    return token_ids[:limit] if side == "right" else token_ids[-limit:]


def _around(token_ids: list[int], plain: list[int]) -> tuple[list[int], list[int]]:
    """The special tokens before and behind those of the text; none, if it is not found among them."""
    for start in range(len(token_ids) - len(plain) + 1):
        if token_ids[start : start + len(plain)] == plain:
            return token_ids[:start], token_ids[start + len(plain) :]
    return [], []
