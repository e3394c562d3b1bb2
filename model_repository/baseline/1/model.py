"""The baseline: a completion-locked batch.  Triton's dynamic batcher, then a padded `generate()`.

`execute()` gets up to eight requests, pads their prompts on the left and decodes until the longest
output is complete; no request gets its response before that, and none joins meanwhile.  Within that
design it is as good as it gets: sdpa attention, the checkpoint's dtype, no decoding after the last
request of the batch is complete, each output cut at its request's `max_tokens` and end of sequence.

`model.json` names an Inflight model whose checkpoint, dtype and threads to use:

    {"like": "../../demo/1/model.json"}

or sets them itself: `model` (required), `dtype`, `device`, `cpu_threads`, `max_model_len` and
`default_max_tokens`, with the same meaning as for the `inflight` backend.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import StoppingCriteria, StoppingCriteriaList

_KEYS = ("model", "dtype", "device", "cpu_threads", "max_model_len", "default_max_tokens")
_SAMPLING = {"max_tokens": int, "temperature": float, "top_k": int, "top_p": float, "ignore_eos": bool}


def read_options(path: Path) -> dict[str, Any]:
    """The options of a `model.json`, including those of the model it is `like`.

    A `model` that is a folder beside its `model.json` becomes an absolute path.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    options: dict[str, Any] = {}
    if "like" in values:
        options = read_options((path.parent / values.pop("like")).resolve())
    options.update({key: values[key] for key in _KEYS if values.get(key) is not None})
    if (path.parent / str(options.get("model"))).is_dir():
        options["model"] = str((path.parent / options["model"]).resolve())
    return options


@dataclass
class BatchMember:
    """One request of a batch; `response` is set once it is rejected or complete."""

    prompt: list[int]
    text: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    ignore_eos: bool
    response: Any = None

    @property
    def settings(self) -> tuple[float, int, float, bool]:
        """Options that `generate()` takes once for a whole batch."""
        return (self.temperature, self.top_k, self.top_p, self.ignore_eos)


class LengthPerRow(StoppingCriteria):
    """Ends each row at its number of new tokens, so that the batch ends with its longest row."""

    def __init__(self, width: int, limits: torch.Tensor) -> None:
        self.width, self.limits = width, limits

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.width >= self.limits


class TritonPythonModel:
    """One instance: the checkpoint in this process."""

    def initialize(self, args: dict[str, str]) -> None:
        options = read_options(Path(pb_utils.get_model_dir()).resolve() / "model.json")
        device = options.get("device", "auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if "cpu_threads" in options:
            torch.set_num_threads(options["cpu_threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=options.get("dtype", "auto"), attn_implementation="sdpa"
        ).eval()
        self._model.to(device)
        self._device = device
        self._tokenizer = AutoTokenizer.from_pretrained(options["model"])
        self._max_model_len = options.get("max_model_len") or self._model.config.max_position_embeddings
        self._default_max_tokens = options.get("default_max_tokens", 16)
        eos = self._model.generation_config.eos_token_id
        self._eos: list[int] = [] if eos is None else eos if isinstance(eos, list) else [eos]
        pb_utils.Logger.log_info(
            f"{args['model_name']}: generate() in padded batches, {self._model.dtype} on {device}, "
            f"max_model_len={self._max_model_len}, {torch.get_num_threads()} threads"
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        members = [self._parse(request) for request in requests]
        waiting = sorted((member for member in members if member.response is None), key=lambda member: member.settings)
        for settings, alike in groupby(waiting, key=lambda member: member.settings):
            batch = list(alike)
            try:
                self._generate(batch, settings)
            except Exception as error:
                for member in batch:
                    member.response = _error(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
        return [member.response for member in members]

    def _parse(self, request: Any) -> BatchMember:
        values = {name: _value(request, name) for name in ("text_input", "input_ids", "stream", "sampling_parameters")}
        member = BatchMember([], values["text_input"] or "", self._default_max_tokens, 1.0, 0, 1.0, False)
        try:
            if values["stream"]:
                raise ValueError("stream=true: a completion-locked batch responds once, at its end; set it to false")
            if (values["text_input"] is None) == (values["input_ids"] is None):
                raise ValueError("give exactly one of text_input and input_ids")
            ids = values["input_ids"]
            member.prompt = ids.tolist() if ids is not None else self._tokenizer(member.text).input_ids
            given = _sampling_parameters(values["sampling_parameters"])
            given.update({name: value for name in _SAMPLING if (value := _value(request, name)) is not None})
            for name, value in given.items():
                if name in _SAMPLING:
                    setattr(member, name, _SAMPLING[name](value))
            if not member.prompt or len(member.prompt) + member.max_tokens > self._max_model_len:
                raise ValueError(
                    f"{len(member.prompt)} prompt tokens and max_tokens={member.max_tokens}: must be at least one "
                    f"prompt token, and at most {self._max_model_len} tokens together"
                )
            if ids is not None or _value(request, "exclude_input_in_output"):
                member.text = ""
        except (ValueError, TypeError) as error:
            member.response = _error(str(error), pb_utils.TritonError.INVALID_ARG)
        return member

    @torch.inference_mode()
    def _generate(self, batch: list[BatchMember], settings: tuple[float, int, float, bool]) -> None:
        """Decode one batch with equal settings and set the responses of its members."""
        temperature, top_k, top_p, ignore_eos = settings
        width = max(len(member.prompt) for member in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, member in enumerate(batch):
            ids[row, width - len(member.prompt) :] = torch.tensor(member.prompt)
            mask[row, width - len(member.prompt) :] = 1
        limits = torch.tensor([member.max_tokens for member in batch], device=self._device)
        stops = [] if ignore_eos else self._eos
        sampled = {"do_sample": True, "temperature": temperature, "top_k": max(top_k, 0), "top_p": top_p}
        out = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=int(limits.max()),
            eos_token_id=stops or None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([LengthPerRow(width, limits)]),
            **(sampled if temperature > 0 else {"do_sample": False}),
        )
        for member, row in zip(batch, out[:, width:].tolist()):
            member.response = self._response(member, row[: member.max_tokens], stops)

    def _response(self, member: BatchMember, tokens: list[int], stops: list[int]) -> Any:
        end = next((at for at, token in enumerate(tokens) if token in stops), None)
        if end is not None:
            tokens = tokens[: end + 1]
        text = member.text + self._tokenizer.decode(tokens, skip_special_tokens=True)
        outputs = {
            "text_output": np.array([[text.encode()]], dtype=object),
            "finish_reason": np.array([[b"length" if end is None else b"stop"]], dtype=object),
            "num_input_tokens": np.array([[len(member.prompt)]], dtype=np.uint32),
            "num_output_tokens": np.array([[len(tokens)]], dtype=np.uint32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"sampling_parameters={text!r}: must be a JSON object")
    return values


def _value(request: Any, name: str) -> Any:
    """An input: the prompt's ids as an array, anything else as one Python value; None if absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy().reshape(-1)
    if name == "input_ids":
        return array
    value = array[0]
    return value.decode() if isinstance(value, bytes) else value.item()


def _error(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
