"""Checkpoints without a language model head, which only yield vectors; and files beside their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError

from inflight.config import EngineConfig
from inflight.hub import CheckpointFileError, checkpoint_file, gguf_file
from inflight.loading.checkpoint.tensor_files import TensorFiles
from inflight.loading.load_errors import LoadError

__all__ = ["is_classifier", "is_encoder", "is_headless", "json_of", "tensors_of", "text_of"]

_CLASSIFIER = "ForSequenceClassification"
_DECODERS = ("ForCausalLM", "LMHeadModel")
# Model types of transformers whose tokens look both ways.
_ENCODERS = {
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "eurobert",
    "gte",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
}


def is_headless(config: EngineConfig) -> bool:
    """Whether the checkpoint has no language model head: it is a classifier, or an encoder of sentences alone."""
    values = json_of(config, "config.json")
    if not isinstance(values, dict):
        return False
    if is_classifier(values) or is_encoder(values):
        return True
    text = text_of(values)
    tied = text.get("tie_word_embeddings", values.get("tie_word_embeddings", True))
    if tied or not isinstance(json_of(config, "modules.json"), list):
        return False
    names = tensors_of(config).dtypes
    return bool(names) and not any("lm_head" in name for name in names)


def is_classifier(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of transformers' `...ForSequenceClassification`."""
    return any(str(name).endswith(_CLASSIFIER) for name in values.get("architectures") or ())


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose tokens look both ways, such as BERT."""
    named = [str(name) for name in values.get("architectures") or ()]
    is_decoder = values.get("is_decoder") or any(name.endswith(_DECODERS) for name in named)
    return values.get("model_type") in _ENCODERS and not is_decoder


def text_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder."""
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def tensors_of(config: EngineConfig) -> TensorFiles:
    """Of safetensors files; none of others, nor of a GGUF file."""
    try:
        if gguf_file(config.model, config.revision) is not None:
            return TensorFiles("")
        return TensorFiles(config.model, config.revision)
    except (SafetensorError, ValueError, OSError):
        return TensorFiles("")


def json_of(config: EngineConfig, name: str) -> Any:
    """A JSON file of the checkpoint; None if it has none."""
    try:
        path = checkpoint_file(config.model, name, config.revision)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except CheckpointFileError:
        return None
    except (ValueError, OSError) as error:
        raise LoadError(f"{config.model!r}: {name} cannot be read: {error}") from error
