"""Tiny random encoders, saved like real ones, and the vectors that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

__all__ = [
    "ENCODERS",
    "ENCODER_POSITIONS",
    "ENCODER_VOCAB",
    "alone",
    "logits_alone",
    "make_encoder",
    "mini_lm_layout",
    "sentence_pieces",
    "word_pieces",
]

ENCODER_VOCAB = 199
ENCODER_POSITIONS = 66

_COMMON: dict[str, Any] = dict(
    vocab_size=ENCODER_VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=ENCODER_POSITIONS,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
_ROBERTA: dict[str, Any] = dict(pad_token_id=1, type_vocab_size=1)

# model type -> differences from _COMMON
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "camembert": _ROBERTA,
    "distilbert": dict(dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "electra": dict(embedding_size=16),
    "eurobert": dict(num_key_value_heads=2),
    "gte": {},
    "modernbert": dict(
        local_attention=16, num_hidden_layers=3, global_attn_every_n_layers=3, cls_token_id=2, sep_token_id=3,
        bos_token_id=2, eos_token_id=3,
    ),
    "mpnet": dict(pad_token_id=1),
    "nomic_bert": {},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}  # fmt: skip


def make_encoder(model_type: str, folder: Path, labels: Sequence[str] = (), seed: int = 1, **changes: Any) -> str:
    """Save one, with a head for classes if there are `labels`."""
    values = {**_COMMON, **ENCODERS[model_type], **changes}
    if labels:
        values |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    config = AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config)
    model.eval().save_pretrained(folder)
    return str(folder)


def word_pieces(folder: str, **module: Any) -> None:
    """A tokenizer like BERT's: word pieces of single letters, [CLS] and [SEP] around texts, types of pairs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(code) for code in range(33, 127)]
    entries = [*special, *letters, *(f"##{letter}" for letter in letters)]
    fast = Tokenizer(WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))
    fast.normalizer = BertNormalizer(lowercase=True)
    fast.pre_tokenizer = BertPreTokenizer()
    fast.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.add_special_tokens(special)
    fast.save(f"{folder}/tokenizer.json")
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **named}))


def mini_lm_layout(folder: Path) -> None:
    """modules.json and its kin, as sentence-transformers/all-MiniLM-L6-v2 has them."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q "}}))


def sentence_pieces(folder: str) -> None:
    """A tokenizer like XLM-RoBERTa's: a unigram model of letters, <s> and </s> around texts, no types."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.pre_tokenizers import Metaspace
    from tokenizers.processors import TemplateProcessing

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = ["\u2581", *(chr(code) for code in range(33, 127))]
    fast = Tokenizer(Unigram([*((entry, 0.0) for entry in special), *((letter, -2.0) for letter in letters)], unk_id=3))
    fast.pre_tokenizer = Metaspace()
    fast.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast.add_special_tokens(special)
    fast.save(f"{folder}/tokenizer.json")
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        **named,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(values))


@torch.inference_mode()
def alone(model: Any, prompt: list[int], kind: str = "mean", normalizes: bool = True) -> np.ndarray:
    """The vector of transformers' encoder, alone, in float32."""
    hidden = model(torch.tensor([prompt]))[0][0].float()
    vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
    return (normalize(vector, dim=0) if normalizes else vector).numpy()


@torch.inference_mode()
def logits_alone(model: Any, prompt: list[int], second_start: int = 0) -> np.ndarray:
    """The logits of transformers' classifier."""
    ids = torch.tensor([prompt])
    types = {"token_type_ids": (torch.arange(len(prompt)) >= second_start).long()[None]} if second_start else {}
    return model(input_ids=ids, **types).logits[0].float().numpy()
