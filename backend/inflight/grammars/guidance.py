"""Grammars by the library llguidance: an Earley parser over a lexer, walked with a trie of the vocabulary.

Masks take microseconds, and no state is precomputed, so that a grammar is ready within milliseconds.  The library
limits the work of every call; a grammar or sequence that hits a limit is refused alone.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from inflight.grammars.base import NO_SEQUENCE, MaskJob, SequenceId, mask_words
from inflight.grammars.demand import use_grammars
from inflight.grammars.formats import guidance_grammar
from inflight.grammars.guided_sequence import GuidedSequence, SteadyRuns, reason, shown
from inflight.grammars.spec import GrammarSpec
from inflight.grammars.vocabulary import Vocabulary, read_vocabulary
from inflight.heap import LaterTrim, trim_heap

__all__ = ["GuidanceGrammars"]

_MAX_CACHED = 256  # compiled grammars
_MAX_CACHED_BYTES = 16 * 2**20  # of their sources; compiled, they take some ten times that
_COMPILE_SECONDS = 20.0
_PROBED = 4  # tokens that are tried before a grammar is taken
_COMPILERS = 2  # threads: one slow grammar does not hold up the next
# For so long the calling thread makes masks itself.  Others take milliseconds to begin: the idle threads of the forward
# pass hold on to the cores for a while.
_SERIAL_SECONDS = 0.003
_MAX_ENCODED = 4096  # texts whose tokens are remembered
# Bytes of a forced text that are encoded at once, and the tokens at the end of so many that may be others in the whole
# text.  Each token of it has what is left encoded, and a literal can have 100,000 characters.
_MAX_ENCODED_LENGTH = 256
_UNCERTAIN = 8
# The library makes a trie of the tokens that each of several patterns matches, for masks that allow all of them, with
# 50 to 65 bytes for every token of the vocabulary.  Without the one of white space, masks of JSON take no longer, and
# those of any white space 4 us.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]+"
_NARROW = 0.9  # of the tokens: masks of fewer are made apart, and copied


@dataclass
class _Entry:
    """A grammar that is being compiled, or was.

    Attributes:
        compiled: an `LLMatcher` at the start, or the error text.
        begun: seconds, a monotonic clock; infinite while it waits for other grammars.
    """

    compiled: Future[Any] = field(init=False)
    begun: float = math.inf


class GuidanceGrammars:
    """Implements `Grammars`.

    Args:
        read_tokenizer: returns the text of tokenizer.json; called in a thread.  A ValueError says why there are no
            grammars.
        vocab_size: tokens that logits have.
        eos_token_ids: what ends a sequence where the grammar does.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()  # guards the entries
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammars")
        self._read_tokenizer = read_tokenizer
        self._walks: WeakValueDictionary[SequenceId, GuidedSequence] = WeakValueDictionary()
        self._runs = SteadyRuns()
        self._tokenizer: Future[Any] | None = None
        self._executor: Any = None
        # Set when the vocabulary is read: the first tokens, which grammars can allow, and words of the library's masks.
        self._num_known, self._num_words = vocab_size, mask_words(vocab_size)

    def warm_up(self) -> None:
        with self._lock:
            self._begin_to_load(idle=True)

    def load(self) -> None:
        """Read the vocabulary in this thread, and start no other: a fork can use it then.

        Raises:
            ValueError: there can be no grammars; says why.
        """
        loaded = self._load(idle=True)
        trim_heap()
        with self._lock:
            self._tokenizer = Future()
            self._tokenizer.set_result(loaded)

    def start(self, spec: GrammarSpec) -> None:
        self._entry(spec)

    def outcome(self, spec: GrammarSpec) -> str | None:
        entry = self._entry(spec)
        if entry.compiled.done():
            compiled = entry.compiled.result()
            return compiled if isinstance(compiled, str) else ""
        if time.monotonic() - entry.begun > _COMPILE_SECONDS:
            return f"the grammar was not compiled within {_COMPILE_SECONDS:g} s: simplify it"
        return None

    def new(self, spec: GrammarSpec) -> GuidedSequence:
        compiled = self._entry(spec).compiled.result()
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return GuidedSequence(compiled.deep_copy(), self._num_known, self._eos_token_ids, self._runs)

    def walk(self, sequence: SequenceId, spec: GrammarSpec) -> GuidedSequence:
        found = None if sequence == NO_SEQUENCE else self._walks.get(sequence)
        if found is None:
            found = self._walks[sequence] = self.new(spec)
        return found

    def forget(self, sequence: SequenceId) -> None:
        self._walks.pop(sequence, None)

    def fill(self, jobs: Sequence[MaskJob], bitmask: np.ndarray, in_background: bool = True) -> None:
        live: list[MaskJob] = [job for job in jobs if not job.grammar.error]
        num_words = self._num_words
        is_narrow = self._num_known < self._vocab_size
        known = np.empty((len(bitmask), num_words), dtype=np.int32) if is_narrow else bitmask
        known.fill(-1)
        rest = live if in_background else _fill_within(_SERIAL_SECONDS, live, known)
        if rest:
            self._fill_by_threads(rest, known)
        if is_narrow:
            # The library knows fewer tokens than the last word has bits: only rows without a mask have all of them.
            allow_all = known[:, -1] == -1
            known[~allow_all, -1] &= (1 << self._num_known % 32) - 1
            bitmask[:, :num_words] = known
            bitmask[:, num_words:] = -allow_all[:, None].astype(np.int32)
        for job in live:
            assert isinstance(job.grammar, GuidedSequence)
            job.grammar.check()

    def _fill_by_threads(self, jobs: list[MaskJob], bitmask: np.ndarray) -> None:
        masks, where = self._masks(), (bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize, len(bitmask))
        plain = [(_matcher(job), job.row) for job in jobs if not _drafts(job)]
        drafted = [(_matcher(job), job.row, drafts) for job in jobs if (drafts := _drafts(job))]
        if plain:
            masks.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            masks.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)

    def _masks(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(8, len(os.sched_getaffinity(0))))
        return self._executor

    def _entry(self, spec: GrammarSpec) -> _Entry:
        with self._lock:
            tokenizer = self._begin_to_load()
            entry = self._entries.get(spec)
            if entry is None:
                use_grammars()
                entry = self._entries[spec] = _Entry()
                entry.compiled = self._threads.submit(self._compile, spec, tokenizer, entry)
                self._num_bytes += spec.size
            self._entries.move_to_end(spec)
            while len(self._entries) > 1 and (len(self._entries) > _MAX_CACHED or self._num_bytes > _MAX_CACHED_BYTES):
                oldest, _ = self._entries.popitem(last=False)  # sequences that use it have copies
                self._num_bytes -= oldest.size
            return entry

    def _begin_to_load(self, idle: bool = False) -> Future[Any]:
        if self._tokenizer is None:
            self._tokenizer = self._threads.submit(self._load, idle)
            # Several times what stays was used on the way.  Not at once: the first grammar may be waiting.
            self._tokenizer.add_done_callback(lambda _: LaterTrim().ask())
        return self._tokenizer

    def _load(self, idle: bool) -> Any:
        """An `LLTokenizer` and the names of special tokens.

        Args:
            idle: no grammar waits for them, and no step for memory.

        Raises:
            ValueError: there can be no grammars, and why.
        """
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise ValueError("structured output needs the package llguidance: pip install llguidance") from None
        if not self._eos_token_ids:
            raise ValueError("structured output needs an end-of-sequence token, and this checkpoint has none")
        vocabulary = read_vocabulary(self._read_tokenizer())
        if idle:
            trim_heap()  # the tries use half of the room that they take: what is never written there stays the system's
        ours = _Wrapped(vocabulary, self._vocab_size, self._eos_token_ids)
        self._num_known, self._num_words = ours.num_known, mask_words(len(ours.tokens))
        wrapped = TokenizerWrapper(ours)
        try:
            slices = [pattern for pattern in LLTokenizer.general_slices() if pattern != _WHITE_SPACE]
            tokenizer = LLTokenizer(wrapped, eos_token=self._eos_token_ids, slices=slices)
        except Exception as error:
            raise ValueError(f"structured output is not possible with this checkpoint's tokenizer: {error}") from None
        names = vocabulary.names
        wrapped.tokens = ours.tokens = vocabulary.tokens = []  # the library has copied them
        return tokenizer, names

    def _compile(self, spec: GrammarSpec, tokenizer: Future[Any], entry: _Entry) -> Any:
        """An `LLMatcher`, or the error text."""
        try:
            vocabulary, names = tokenizer.result()
            entry.begun = time.monotonic()
            from llguidance import LLMatcher

            matcher = LLMatcher(vocabulary, guidance_grammar(spec, names, self._num_known), log_level=0)
            if matcher.is_error():
                return shown(matcher.get_error())
            return self._refused(matcher.deep_copy()) or matcher
        except BaseException as error:  # a panic, too; no signal handler runs in this thread
            return shown(str(error))

    def _refused(self, first: Any) -> str:
        """Why a grammar is refused; "" if it is not.  Many show only on their way that they are beyond a limit.

        Args:
            first: an `LLMatcher` at the start, which this method uses up.
        """
        mask = np.zeros(self._num_words, dtype=np.int32)
        choose = random.Random(0)
        for num_tokens in range(_PROBED + 1):
            if not first.is_error():
                first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if first.is_error():
                return reason(first)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < self._num_known]
            going_on = allowed[~np.isin(allowed, self._eos_token_ids)].tolist()
            if not going_on:
                return "" if len(allowed) or num_tokens else "the grammar allows no text at all"
            first.try_consume_tokens([choose.choice(going_on)])
        return ""


class _Wrapped:
    """The tokenizer that llguidance requires, for the first of V tokens.

    The library has half a dozen tries, each with 60 bytes for every token that it was told of.  If V is much larger
    than the vocabulary of `tokenizers`, it is told of none behind that, or of one, so that the last word of a mask has
    a bit that is never set.  Tokens without bytes are in no trie: only a grammar that speaks of tokens, such as Lark's
    `<[*]>`, allows them.

    Attributes:
        num_known: the first tokens, without that one.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: list[int]) -> None:
        num_known = max(len(vocabulary.tokens), *(token + 1 for token in eos_token_ids))
        if num_known > _NARROW * vocab_size:
            num_known = vocab_size
        self.num_known = num_known
        num_told = num_known + (num_known < vocab_size and num_known % 32 == 0)
        self.tokens = [*vocabulary.tokens, *[b""] * (num_told - len(vocabulary.tokens))][:vocab_size]
        for token in {*eos_token_ids} & set(range(vocab_size)):
            self.tokens[token] = self.tokens[token] or b"<eos %d>" % token
        self.special_token_ids = sorted({*vocabulary.special_ids, *eos_token_ids} & set(range(vocab_size)))
        self.eos_token_id = eos_token_ids[0]
        self._vocab_size = vocab_size
        self._encode = lru_cache(_MAX_ENCODED)(vocabulary.encode)  # forced texts repeat from row to row

    def __call__(self, text: bytes | str) -> list[int]:
        beginning = text[:_MAX_ENCODED_LENGTH]
        if isinstance(beginning, bytes):
            beginning = beginning.decode("utf-8", errors="replace")
        tokens = [token for token in self._encode(beginning) if token < self._vocab_size]
        return tokens if len(text) <= _MAX_ENCODED_LENGTH else tokens[:-_UNCERTAIN] or tokens[:1]


def _fill_within(seconds: float, jobs: list[MaskJob], bitmask: np.ndarray) -> list[MaskJob]:
    """Returns the jobs that are left when the time is over."""
    address, num_bytes = bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize
    end = time.perf_counter() + seconds
    for done, job in enumerate(jobs):
        if time.perf_counter() > end:
            return jobs[done:]
        _fill_job(job, address + job.row * num_bytes, num_bytes)
    return []


def _fill_job(job: MaskJob, first: int, num_bytes: int) -> None:
    """The masks of a job; `first` is the address of its first row."""
    matcher = _matcher(job)
    matcher.unsafe_compute_mask_ptr(first, num_bytes)
    taken = 0
    for draft in _drafts(job):
        if matcher.try_consume_tokens([draft]) == 0:
            break
        taken += 1
        matcher.unsafe_compute_mask_ptr(first + taken * num_bytes, num_bytes)
    matcher.rollback(taken)


def _matcher(job: MaskJob) -> Any:
    assert isinstance(job.grammar, GuidedSequence)
    return job.grammar.matcher_behind(job.behind)


def _drafts(job: MaskJob) -> list[int]:
    assert isinstance(job.grammar, GuidedSequence)
    return job.grammar.known_ids(job.draft_token_ids)
