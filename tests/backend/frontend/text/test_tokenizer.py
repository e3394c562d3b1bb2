from __future__ import annotations

from pathlib import Path

import pytest
from frontend_rig import CHECKPOINT, demo_tokenizer

from inflight.frontend.text import tokenizer
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError

BYTE_LEVEL = demo_tokenizer()


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    found = BYTE_LEVEL.bad_words_ids(["the", "the"])
    assert [BYTE_LEVEL.decode(ids) for ids in found] == ["the", " the"]


def test_encode_adds_the_post_processors_special_tokens() -> None:
    assert BYTE_LEVEL.encode("the")[0] == 0
    assert 0 not in BYTE_LEVEL.encode("the", add_special_tokens=False)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_what_was_used_to_read_a_tokenizer_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once what is no longer needed has been freed."""
    events: list[str] = []
    monkeypatch.setattr(Tokenizer, "__init__", lambda self, backend: events.append("made"))
    monkeypatch.setattr(tokenizer, "trim_heap", lambda: events.append("trimmed"))
    Tokenizer.load(str(CHECKPOINT))
    assert events == ["made", "trimmed"]
