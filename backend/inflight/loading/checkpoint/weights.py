"""A checkpoint's weights, by transformers: every tensor has a place in the model, and every place a tensor."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from inflight.attention.hf import IMPLEMENTATION
from inflight.byte_sizes import format_bytes
from inflight.config import EngineConfig
from inflight.device.memory import available_memory
from inflight.hub import gguf_file, snapshot
from inflight.loading.checkpoint import fp8_scheme
from inflight.loading.checkpoint.headless import is_classifier, is_encoder
from inflight.loading.checkpoint.kept_codes import saved_by_codes
from inflight.loading.checkpoint.plausible import check_sizes
from inflight.loading.checkpoint.tensor_files import headers_of, weight_files
from inflight.loading.load_errors import LoadError, in_models_code, in_one_line
from inflight.loading.quantization import fp8_linear
from inflight.loading.quantization.block_fp8_linear import stays_in_blocks
from inflight.loading.quantization.mxfp4_experts import stays_packed
from inflight.loading.quantization.schemes import scheme_of

__all__ = ["check_weights_fit", "dummy_weights", "from_config", "pretrained"]

# Tensors that belong to no module and change no logits: scales of an fp8 KV cache, tables that older versions of
# transformers saved, the head of a classifier (`loading/pooler.py`), and causal masks [1, 1, n, n] (`_is_mask`).
_IGNORED = re.compile(
    r"\.(q|k|v|prob|kv)_scale$|\.kv_cache_scaling_factor$|\.[kv]_proj\.output_scale$"
    r"|^score\.weight$|(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.(attn|attention)\.masked_bias$"
)
_CODES = re.compile(r"\.(qweight|weight_packed)$|\.weight\.absmax$")  # with several weights a number
_SCORE = "score.weight"  # of a classifier
# Of encoders: heads for training, without which hidden states are the same; positions that older versions saved.
_BESIDE_ENCODER = re.compile(
    r"^(cls|lm_head|vocab_\w+|head|decoder|generator_\w+|discriminator_\w+|predictions|qa_outputs)\.|(^|\.)pooler\."
    r"|(^|\.)embeddings\.(position_ids|token_type_ids)$"
)
_MASK = re.compile(r"\.(attn|attention)\.bias$")
_NUMBERS = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U64", "U32", "U16", "BOOL", "C64"}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file; `code` is its dtype's name if that has eight bits or less: a code of some quantization."""

    shape: list[int]
    code: str | None


def check_weights_fit(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the size of the weights with the free memory before reading or making them.

    Raises:
        LoadError: they do not fit (by how much), a file is damaged, or config.json describes another model.
    """
    files = _files(config) if config.load_format != "dummy" else []
    if files and all(file.is_file() for file in files):
        check_sizes(
            f"{config.model!r} ({hf_config.model_type}) cannot be loaded",
            hf_config.get_text_config(decoder=True),
            {name: stored.shape for name, stored in _stored(config).items()},
            lambda: from_config(config, hf_config, dtype, torch.device("meta")),
        )
    if _is_dequantised(config):
        model = from_config(config, hf_config, dtype, torch.device("meta"))
        need = sum(parameter.nbytes for parameter in model.parameters())
        need -= saved_by_codes(config, model, _stored(config), dtype, device)
    else:
        need = sum(_num_weights(stored) for stored in _stored(config).values()) * dtype.itemsize
        need -= _saved_by_scheme(config, hf_config, dtype, device) + _saved_by_mxfp4(config, dtype)
    free = available_memory(device)
    if need > free:
        raise LoadError(
            f"the weights of {config.model!r} take {format_bytes(need)} as {str(dtype).removeprefix('torch.')}, "
            f"{format_bytes(need - free)} more than the {format_bytes(free)} free on {device}"
        )


def _is_dequantised(config: EngineConfig) -> bool:
    """Whether weights take more memory than their files say; or there are none."""
    if config.load_format == "dummy" or gguf_file(config.model, config.revision) is not None:
        return True
    return any(_CODES.search(name) or stored.code == "I8" for name, stored in _stored(config).items())


def _saved_by_scheme(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that weights take less than in `dtype`: those stored in fp8, or quantised on the way to `device`."""
    values, scheme = fp8_scheme.quantization(hf_config) or {}, scheme_of(config)
    if sizes := [prod(stored.shape) for stored in _stored(config).values() if stored.code == "F8_E4M3"]:
        why = fp8_linear.unsupported(device, dtype) or fp8_scheme.unquantised_inputs(values)
        is_kept = why is None or stays_in_blocks(config, fp8_scheme.block_size(values), dtype)
        return sum(sizes) * (dtype.itemsize - 1) if is_kept else 0
    return scheme.bytes_saved(lambda: from_config(config, hf_config, dtype, torch.device("meta")), hf_config, dtype)


def _saved_by_mxfp4(config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes that codes of four bits take less as they are stored than in `dtype`."""
    if not stays_packed(config, dtype):
        return 0
    packed = [stored for stored in _stored(config).values() if stored.code == "U8"]
    return sum(_num_weights(stored) * dtype.itemsize - prod(stored.shape) for stored in packed)


def _num_weights(stored: _Stored) -> int:
    return prod(stored.shape) * (2 if stored.code == "U8" else 1)  # bytes with two numbers of four bits


def _stored(config: EngineConfig) -> dict[str, _Stored]:
    """The checkpoint's tensors by name, from the headers of its files, if they are on this machine.

    Raises:
        LoadError: a file is damaged.
    """
    found: dict[str, _Stored] = {}
    for file in _files(config):
        if file.is_file():
            found |= _header(config.model, file)
    return found


def _files(config: EngineConfig) -> list[Path]:
    """Files of the weights, if this machine has the checkpoint."""
    folder = snapshot(config.model, config.revision)
    try:
        return [] if folder is None else weight_files(folder)
    except ValueError as error:
        raise LoadError(f"{config.model!r} cannot be loaded: {error}") from None


def _header(model: str, file: Path) -> dict[str, _Stored]:
    try:
        return _safetensors_header(file) if file.suffix == ".safetensors" else _pickle_header(file)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{model!r}: {file.name} is damaged, or contains more than tensors: {in_one_line(error)}"
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        why = in_one_line(error)
        raise LoadError(f"{model!r}: {file.name} is damaged or incomplete ({why}); download it again") from error


def _safetensors_header(file: Path) -> dict[str, _Stored]:
    return {
        name: _Stored(list(shape), None if dtype in _NUMBERS else dtype)
        for name, (dtype, shape) in headers_of(file).items()
    }


def _pickle_header(file: Path) -> dict[str, _Stored]:
    """Of a file in pickle's format, which is only read: `weights_only` runs nothing that it contains."""
    tensors = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file) or None)
    return {
        name: _Stored(
            list(value.shape), None if value.itemsize > 1 or value.dtype == torch.bool else _code(value.dtype)
        )
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


def pretrained(
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    read_elsewhere: re.Pattern[str] | None = None,
    **options: Any,
) -> nn.Module:
    """The model on `device`, with our attention implementation.

    Files in pickle's format are read with `weights_only`: they can contain tensors and nothing that runs.

    Args:
        read_elsewhere: names of tensors that the caller reads; the caller then also knows what eight-bit codes mean.
        options: passed to `from_pretrained`; with a `state_dict`, no file is read.

    Raises:
        LoadError: transformers cannot load it, or weights are missing, of other shapes, or without a place.
    """
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else transformers has the hub convert pickled files
    options |= dict(
        config=hf_config,
        dtype=dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=IMPLEMENTATION,
        weights_only=True,
        ignore_mismatched_sizes=True,  # rejected below, by name
        output_loading_info=True,
    )
    try:
        is_expected = read_elsewhere is None and _SCORE not in _stored(config) and not is_encoder(hf_config.to_dict())
        with nullcontext() if is_expected else _quietly():
            if "state_dict" in options:
                made: Any = type(from_config(config, hf_config, dtype, torch.device("meta")))
                model, report = made.from_pretrained(None, **options)
            else:
                model, report = _auto_class(hf_config).from_pretrained(_source(config), **options)
    except Exception as error:  # whatever the library, the model's code or a file raises
        raise _cannot_load(config, hf_config, error) from error
    if read_elsewhere is not None:
        report["unexpected_keys"] = {name for name in report["unexpected_keys"] if not read_elsewhere.search(name)}
    if is_encoder(hf_config.to_dict()):
        report["unexpected_keys"] = {name for name in report["unexpected_keys"] if not _BESIDE_ENCODER.search(name)}
        report["missing_keys"] = {name for name in report["missing_keys"] if not name.startswith("pooler.")}
    plain = read_elsewhere is None and "quantization_config" not in options
    _check_report(config, hf_config, report, plain)
    return scheme_of(config).place(model, hf_config, device, config.check_on_load).eval().requires_grad_(False)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' table of tensors that the model has no place for."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _code(dtype: torch.dtype) -> str:
    return {torch.uint8: "U8"}.get(dtype, str(dtype).removeprefix("torch."))


def _source(config: EngineConfig) -> str:
    """The checkpoint's folder if all of its weights are in it, so that nothing asks the hub; else its hub id."""
    files = _files(config)
    return str(files[0].parent) if files and all(file.is_file() for file in files) else config.model


def _check_report(config: EngineConfig, hf_config: Any, report: dict[str, Any], plain: bool) -> None:
    """Refuse what transformers only warns about.

    Args:
        report: its account of the keys; already without tied weights and what the model's class says to ignore.
        plain: weights are stored as numbers, not as codes of a quantization.
    """
    where = f"{config.model!r} ({hf_config.model_type}) cannot be loaded"
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise LoadError(
            f"{where}: its weights do not match its config.json: {name} has shape {list(found)}, not {list(expected)}"
        )
    if report["missing_keys"]:  # transformers initialises them randomly
        missing = sorted(report["missing_keys"])
        raise LoadError(f"{where}: {len(missing)} weights are in none of its files, such as {missing[0]}")
    stored = _stored(config)
    unplaced = sorted(name for name in report["unexpected_keys"] if not _is_idle(name, stored.get(name)))
    if unplaced:
        raise LoadError(
            f"{where}: the model that config.json describes has no place for {len(unplaced)} of its tensors, such as "
            f"{unplaced[0]}; they may be scales of quantized weights, adapters or further heads, without which "
            "the others mean something else: convert the checkpoint with the tool that made it"
        )
    codes = {name: entry.code for name, entry in stored.items() if entry.code and not _is_idle(name, entry)}
    if plain and codes:
        name, code = min(codes.items())
        raise LoadError(
            f"{where}: {len(codes)} of its tensors are codes of some quantization, such as {name} ({code}), and its "
            "config.json has no quantization_config that says what they mean"
        )


def _is_idle(name: str, stored: _Stored | None) -> bool:
    """Whether a tensor without a place changes no logits."""
    if _IGNORED.search(name):
        return True
    shape = stored.shape if stored is not None else []
    return bool(_MASK.search(name)) and len(shape) == 4 and shape[:2] == [1, 1] and shape[2] == shape[3]


def dummy_weights(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Random weights as the model's own initialisation makes them before training: small, so logits stay finite."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        model = from_config(config, hf_config, dtype, device)
        return scheme_of(config).place(model, hf_config, device, config.check_on_load).eval().requires_grad_(False)


def from_config(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model that config.json describes, made on `device`.

    Raises:
        LoadError: transformers cannot make it.
    """
    try:
        with device:
            return _auto_class(hf_config).from_config(
                hf_config,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                attn_implementation=IMPLEMENTATION,
            )
    except Exception as error:  # whatever the library or the model's code raises
        raise _cannot_load(config, hf_config, error) from error


def _auto_class(hf_config: Any) -> Any:
    """The class of transformers that loads the checkpoint."""
    values = hf_config.to_dict()
    if not is_encoder(values):
        return AutoModelForCausalLM
    return AutoModelForSequenceClassification if is_classifier(values) else AutoModel


def _cannot_load(config: EngineConfig, hf_config: Any, error: Exception) -> LoadError:
    reason = in_one_line(error)
    if isinstance(error, (TypeError, AttributeError, IndexError, KeyError, AssertionError)):  # says little by itself
        reason = f"{type(error).__name__}: {reason}{in_models_code(error)}"
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        reason = "its attention does not use transformers' AttentionInterface"
    return LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {reason}")
