"""A tiny checkpoint with the demo model's tokenizer, and its grammars."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from inflight.grammars.guidance import GuidanceGrammars

DEMO = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"
VOCAB = 2560
EOS = 0


class _Bytes:
    """A vocabulary of the 256 bytes, and an end of sequence."""

    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


_BYTES = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[_Bytes.eos_token_id])


class ByteGrammar:
    """A compiled grammar that is asked for whole texts.

    Attributes:
        error: why it is refused; "" if it is not.
    """

    def __init__(self, source: str) -> None:
        self._start = LLMatcher(_BYTES, source, log_level=0)
        self.error = self._start.get_error() if self._start.is_error() else ""

    def accepts(self, text: str) -> bool:
        """Whether the text is complete."""
        matcher, token_ids = self._start.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO))


@pytest.fixture(scope="session")
def grammars() -> GuidanceGrammars:
    return GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = make_checkpoint(
        "llama",
        tmp_path_factory.mktemp("grammars"),
        vocab_size=VOCAB,
        eos_token_id=EOS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    shutil.copy(DEMO, path)
    return path
