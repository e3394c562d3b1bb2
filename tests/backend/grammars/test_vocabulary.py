"""The bytes of tokens as tokenizers decode them, vocabularies without grammars, and the memory that one takes."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from panics import Panic
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from inflight import heap
from inflight.grammars import guidance
from inflight.grammars.base import MaskJob, mask_words
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.spec import GrammarSpec
from inflight.grammars.vocabulary import _compact, read_vocabulary

from .conftest import DEMO, EOS, VOCAB
from .test_guidance import DIGITS, SCHEMA, allows, outcome

CORPUS = ['the quick brown fox {"name": "x", "age": 12} jumps', "ünïcode ☃ text 日本"] * 3


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    return made


def byte_fallback() -> Tokenizer:
    vocab = {"</s>": 0, "<unk>": 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for letter in '▁abcdefghijklmnopqrstuvwxyz{}":, 0123456789':
        vocab.setdefault(letter, len(vocab))
    for merged in ("th", "the", "▁the"):
        vocab[merged] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    specials = ["</s>", "<unk>"]
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=100, special_tokens=specials, unk_token="<unk>")
    )
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_the_bytes_of_a_token_are_those_that_the_tokenizer_decodes(make: Any) -> None:
    made = make()
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    made.add_special_tokens([AddedToken("[CONTROL]", special=True)])
    found = read_vocabulary(made.to_str())
    specials = {made.token_to_id("</s>"), made.token_to_id("[CONTROL]"), made.token_to_id("<unk>")} - {None}
    assert set(found.special_ids) <= specials and found.names["[CONTROL]"] == made.token_to_id("[CONTROL]")
    assert found.tokens[made.token_to_id("<tool_call>")] == b"<tool_call>"
    anchor = made.encode("a", add_special_tokens=False).ids
    before = made.decode(anchor, skip_special_tokens=False)
    for token, data in enumerate(found.tokens):
        text = made.decode([*anchor, token], skip_special_tokens=False).removeprefix(before)
        assert data.decode("utf-8", errors="replace") == text
    for text in ('{"name": "x"}', " the fox", "ünï"):
        assert b"".join(found.tokens[token] for token in found.encode(text)).decode() in (text, text.lstrip())


def with_options() -> Tokenizer:
    vocab = {"a": 0, "##b": 1, "a##b</w>": 2, "ab": 3, "<unk>": 4}
    options: Any = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "unk_token": "<unk>"}
    return Tokenizer(models.BPE(vocab=vocab, merges=[("a", "##b")], dropout=0.5, ignore_merges=True, **options))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, with_options, None])
def test_a_bpe_is_the_one_that_the_library_reads(make: Any) -> None:
    """With tokens of all kinds, some of them in the vocabulary of the model."""
    made = Tokenizer.from_str(DEMO.read_text(encoding="utf-8")) if make is None else make()
    known = "a" if make is with_options else next(iter(made.get_vocab()))
    made.add_tokens([AddedToken("<tool>", single_word=True, lstrip=True, normalized=False), AddedToken(known)])
    made.add_special_tokens([AddedToken("[CONTROL]", special=True), AddedToken("[ONE]", rstrip=True, special=True)])
    made.add_tokens(["plain"])
    text = made.to_str()
    found = _compact(json.loads(text))
    assert found is not None and found[0].to_str() == text
    assert found[1] == made.get_vocab(with_added_tokens=True)


def test_merges_are_read_as_older_versions_wrote_them() -> None:
    made = byte_level()
    parts = json.loads(made.to_str())
    parts["model"]["merges"] = [" ".join(pair) for pair in parts["model"]["merges"]]
    found = _compact(parts)
    assert found is not None and found[0].to_str() == made.to_str()


def moved(parts: Any) -> None:
    parts["added_tokens"][-1]["id"] += 7  # the library gives it another one


@pytest.mark.parametrize(
    "change",
    [lambda parts: parts["model"].update(new=1), lambda parts: parts["model"].pop("type"), moved],
    ids=["an option", "no type", "an id"],
)
def test_what_is_not_known_is_left_to_the_library(change: Any) -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken("[CONTROL]", special=True)])
    parts = json.loads(made.to_str())
    change(parts)
    text = json.dumps(parts)
    assert _compact(json.loads(text)) is None
    theirs = Tokenizer.from_str(text).get_vocab()
    assert {data: token for token, data in enumerate(read_vocabulary(text).tokens)}[b"[CONTROL]"] == theirs["[CONTROL]"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1, "added_tokens": []}', DEMO.read_text()[:-9]])
def test_what_is_no_tokenizer_is_refused_in_the_words_of_the_library(text: str) -> None:
    with pytest.raises(Exception) as theirs:
        Tokenizer.from_str(text)
    with pytest.raises(Exception) as ours:
        read_vocabulary(text)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Tokenizer(models.WordPiece(unk_token="[UNK]", vocab={"[UNK]": 0, "a": 1})), "missing"),
        (Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a")), "missing"),
    ],
)
def test_other_tokenizers_are_refused_by_name(made: Tokenizer, named: str) -> None:
    if isinstance(made.model, models.WordPiece):
        made.decoder, named = decoders.WordPiece(), "WordPiece"
    grammars = GuidanceGrammars(made.to_str, 5, [0])
    assert f"decoder is {named}" in outcome(grammars, DIGITS)


def test_a_checkpoint_without_an_end_of_sequence_token_has_no_grammars() -> None:
    assert "end-of-sequence" in outcome(GuidanceGrammars(DEMO.read_text, VOCAB, []), DIGITS)


@pytest.mark.parametrize("error", [KeyError, Panic])
def test_a_vocabulary_whose_reading_fails_refuses_its_requests(error: type[BaseException]) -> None:
    def read() -> str:
        raise error("no such merge")

    grammars = GuidanceGrammars(read, VOCAB, [EOS])
    assert [outcome(grammars, spec) for spec in (DIGITS, SCHEMA)] == [str(error("no such merge"))] * 2


def test_more_logits_than_tokens_and_fewer(tokenizer: Tokenizer) -> None:
    for size in (VOCAB - 7, VOCAB + 70, VOCAB + 400):
        grammars = GuidanceGrammars(DEMO.read_text, size, [EOS])
        assert outcome(grammars, DIGITS) == ""
        bitmask = np.empty((1, mask_words(size)), dtype=np.int32)
        grammars.fill([MaskJob(grammars.new(GrammarSpec("regex", "(?s:.*)")), 0, [])], bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[0]
        assert bits[EOS] and bits[: min(size, VOCAB)].sum() > VOCAB / 2 and not bits[VOCAB:size].any()
        for token in range(VOCAB, size):
            sequence = grammars.new(GrammarSpec("regex", "(?s:.*)"))
            assert sequence.settle([], [token], [True]) == sequence.num_allowed([token]) == 0
            sequence.advance([token])
            assert sequence.error


@pytest.mark.parametrize("in_background", [True, False])
def test_drafts_that_the_tokenizer_does_not_have_are_refused_like_others(in_background: bool) -> None:
    """The library would end the sequence: it does not know them."""
    size = VOCAB + 400
    grammars = GuidanceGrammars(DEMO.read_text, size, [EOS])

    def masks(*jobs: MaskJob) -> np.ndarray:
        bitmask = np.empty((6, mask_words(size)), dtype=np.int32)
        grammars.fill(jobs, bitmask, in_background)
        return np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :size]

    for unknown in (VOCAB, VOCAB + 1, size - 1):
        sequence, free = grammars.new(DIGITS), grammars.new(GrammarSpec("regex", "(?s:.*)"))
        bits = masks(MaskJob(sequence, 0, [unknown, 5]), MaskJob(free, 3, [unknown]))
        assert bits[[0, 3]].any(axis=1).all() and not bits[[0, 3], VOCAB:].any(), "masks"
        assert bits[[1, 2, 4, 5]].all(), "what is behind a refused draft, and a row without a job, allow all"
        good = int(np.flatnonzero(bits[0])[-1])
        assert not allows(sequence, [], [unknown]) and sequence.num_allowed([good, unknown]) == 1
        assert sequence.settle([good], [good, unknown], [True, True]) == 1
        again = masks(MaskJob(sequence, 1, [good, unknown], [good]))
        assert (again[1] == masks(MaskJob(sequence, 0, [good]))[1]).all()
        sequence.advance([good])
        assert not sequence.error and not free.error
        sequence.advance([unknown])
        assert sequence.error == f"the grammar cannot go on: it does not allow token {unknown}"


@pytest.mark.parametrize("tokens", ["<[*]>", "<[^1]>", "<[*]> <[*]>"])
def test_a_grammar_of_any_token_allows_those_that_the_tokenizer_has(tokens: str) -> None:
    """Masks and drafts agree about the others."""
    spec = GrammarSpec("grammar", f"start: {tokens}")
    for size, known in ((VOCAB, VOCAB), (VOCAB + 70, VOCAB + 70), (VOCAB + 400, VOCAB)):
        grammars = GuidanceGrammars(DEMO.read_text, size, [EOS])
        assert outcome(grammars, spec) == ""
        bitmask = np.empty((4, mask_words(size)), dtype=np.int32)
        jobs = [MaskJob(grammars.new(spec), 0, []), MaskJob(grammars.new(spec), 1, [size - 1])]
        for in_background in (True, False):
            grammars.fill(jobs, bitmask, in_background)
            bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :size]
            allowed = np.arange(size) < known
            allowed[1] = "^" not in tokens
            assert (bits[:2] == allowed).all() and bits[3].all()
            assert size == known or bits[2].all(), "behind a draft that it refuses, all are allowed"
        for token in (known - 1, known, size - 1):
            does = token < known
            assert grammars.new(spec).num_allowed([token]) == does
            assert grammars.new(spec).settle([], [token], [True]) == does
            assert grammars.new(spec).settle([token], [token, token], [True, True]) >= does
            sequence = grammars.new(spec)
            sequence.advance([token])
            assert bool(sequence.error) != does


@pytest.mark.parametrize("size", [VOCAB, VOCAB + 31, VOCAB + 400])
def test_a_grammar_that_names_a_token_that_the_vocabulary_lacks_is_refused(size: int) -> None:
    grammars = GuidanceGrammars(DEMO.read_text, size, [EOS])
    known = VOCAB if size == VOCAB + 400 else size
    for tokens in (f"<[{known}]>", f'"a" <[5,{known}]>', f"<[5-{known + 9}]>", f"<[^{known + 300}]>"):
        said = outcome(grammars, GrammarSpec("grammar", f"start: {tokens}"))
        assert said.endswith(f"and the vocabulary has 0 to {known - 1}: name one of those") and f" {known}"[:3] in said
    for text in (f"<[{known - 1}]>", f'"<[{known}]>" // <[{known}]>', f"/<.{known}.>/"):
        assert outcome(grammars, GrammarSpec("grammar", f"start: {text}")) == ""


def test_an_end_of_sequence_that_has_no_text_or_no_logits() -> None:
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB + 70, [VOCAB + 3, VOCAB + 100])
    assert "out of range" in outcome(grammars, DIGITS)
    for size in (VOCAB + 70, VOCAB + 400):
        grammars = GuidanceGrammars(DEMO.read_text, size, [VOCAB + 3])
        assert outcome(grammars, DIGITS) == ""
        bitmask = np.empty((1, mask_words(size)), dtype=np.int32)
        grammars.fill([MaskJob(grammars.new(GrammarSpec("regex", "a?")), 0, [])], bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[0]
        assert bits[VOCAB + 3] and not bits[VOCAB : VOCAB + 3].any() and not bits[VOCAB + 4 : size].any()


def test_what_a_vocabulary_is_made_of_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of tokens that the library has copied; and its tries have no place for tokens behind the tokenizer's."""
    read = []
    monkeypatch.setattr(guidance, "read_vocabulary", lambda text: read.append(read_vocabulary(text)) or read[-1])
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB + 400, [EOS])
    assert outcome(grammars, DIGITS) == ""
    assert not read[0].tokens
    tokenizer, names = grammars._begin_to_load().result()
    assert tokenizer.vocab_size == VOCAB + 1, "masks have a bit that is never set"
    assert tokenizer.decode_bytes([VOCAB]) == b"<[%d]>" % VOCAB, "it has bytes"
    assert names == read[0].names


def test_tries_of_their_own_have_all_usual_parts_but_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes 50 to 65 bytes for each token of a vocabulary; masks in strings take longer without theirs."""
    usual, chosen = LLTokenizer.general_slices(), []

    class Spy:
        general_slices = LLTokenizer.general_slices

        def __new__(cls, tokenizer: Any, eos_token: list[int], slices: list[str]) -> Any:
            chosen.extend(slices)
            return LLTokenizer(tokenizer, eos_token=eos_token, slices=slices)

    monkeypatch.setattr("llguidance.LLTokenizer", Spy)
    GuidanceGrammars(DEMO.read_text, VOCAB, [EOS]).load()
    assert chosen == usual[1:] and len(chosen) == 3  # if not, see which masks of this release take longer


def test_memory_returns_to_the_system_behind_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of running steps wait for memory meanwhile; a spare process, which has no threads, does it at once.

    So it does before the tries are made, and so does an engine that is idle.

    Trims that tests before this one have caused may come meanwhile: they do not count.
    """
    later: list[threading.Thread] = []
    at_once: list[threading.Thread] = []
    may_trim, trimmed = threading.Event(), threading.Event()

    class Later(heap.LaterTrim):
        def _run(self) -> None:
            assert may_trim.wait(60)
            super()._run()
            later.append(threading.current_thread())
            trimmed.set()

    monkeypatch.setattr(guidance, "LaterTrim", Later)
    monkeypatch.setattr(guidance, "trim_heap", lambda: at_once.append(threading.current_thread()))
    monkeypatch.setattr(heap, "_DELAY", 0.0)
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    assert outcome(grammars, DIGITS) == "", "it has not waited"
    may_trim.set()
    assert trimmed.wait(60)
    assert isinstance(later[0], threading.Timer) and not at_once
    GuidanceGrammars(DEMO.read_text, VOCAB, [EOS]).load()
    assert at_once == 2 * [threading.current_thread()] and len(later) == 1
    idle = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    idle.warm_up()
    assert idle._begin_to_load().result() and len(at_once) == 3
