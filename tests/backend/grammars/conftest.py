"""A tiny checkpoint with the demo model's tokenizer, and its grammars."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from tokenizers import Tokenizer

from inflight.grammars.guidance import GuidanceGrammars

DEMO = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"
VOCAB = 2560
EOS = 0


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
