"""The baseline: a completion-locked batch.  Triton's dynamic batcher, then a padded `generate()`.

`execute()` gets up to eight requests, pads their prompts on the left and decodes until the longest
is done; nobody gets an answer before that, and nobody joins meanwhile.  It is written to be as good
as that design gets: sdpa attention, the checkpoint's dtype, no token decoded after the last request
of the batch is done, each request's output cut at its own `max_tokens` and end of sequence.

`model.json` names the Inflight model to take the checkpoint, dtype and threads from:

    {"like": "../../demo/1/model.json"}

or says them itself: `model` (required), `dtype`, `device`, `cpu_threads`, `max_model_len`,
`default_max_tokens`, with the meaning they have for the `inflight` backend.
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
    """The options of a `model.json`, those of the model it is `like` included.

    A `model` that is a folder beside the file that names it becomes absolute.
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
class Job:
    """One request of a batch; `answer` is set when it is refused or done."""

    prompt: list[int]
    text: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    ignore_eos: bool
    answer: Any = None

    @property
    def settings(self) -> tuple[float, int, float, bool]:
        """What `generate()` takes once for a whole batch."""
        return (self.temperature, self.top_k, self.top_p, self.ignore_eos)


class OwnLength(StoppingCriteria):
    """Ends each row at its own number of new tokens, so that a batch ends with its longest."""

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
        jobs = [self._parse(request) for request in requests]
        waiting = sorted((job for job in jobs if job.answer is None), key=lambda job: job.settings)
        for settings, alike in groupby(waiting, key=lambda job: job.settings):
            batch = list(alike)
            try:
                self._generate(batch, settings)
            except Exception as error:
                for job in batch:
                    job.answer = _error(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
        return [job.answer for job in jobs]

    def _parse(self, request: Any) -> Job:
        values = {name: _value(request, name) for name in ("text_input", "input_ids", "stream", "sampling_parameters")}
        job = Job([], values["text_input"] or "", self._default_max_tokens, 1.0, 0, 1.0, False)
        try:
            if values["stream"]:
                raise ValueError("stream=true: a completion-locked batch answers once, at its end; set it to false")
            if (values["text_input"] is None) == (values["input_ids"] is None):
                raise ValueError("give exactly one of text_input and input_ids")
            ids = values["input_ids"]
            job.prompt = ids.tolist() if ids is not None else self._tokenizer(job.text).input_ids
            given = _sampling_parameters(values["sampling_parameters"])
            given.update({name: value for name in _SAMPLING if (value := _value(request, name)) is not None})
            for name, value in given.items():
                if name in _SAMPLING:
                    setattr(job, name, _SAMPLING[name](value))
            if not job.prompt or len(job.prompt) + job.max_tokens > self._max_model_len:
                raise ValueError(
                    f"{len(job.prompt)} prompt tokens and max_tokens={job.max_tokens}: allowed is at least one "
                    f"prompt token, and {self._max_model_len} tokens together"
                )
            if ids is not None or _value(request, "exclude_input_in_output"):
                job.text = ""
        except (ValueError, TypeError) as error:
            job.answer = _error(str(error), pb_utils.TritonError.INVALID_ARG)
        return job

    @torch.inference_mode()
    def _generate(self, batch: list[Job], settings: tuple[float, int, float, bool]) -> None:
        """Decode one batch of equal settings and answer its jobs."""
        temperature, top_k, top_p, ignore_eos = settings
        width = max(len(job.prompt) for job in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        limits = torch.tensor([job.max_tokens for job in batch], device=self._device)
        stops = [] if ignore_eos else self._eos
        sampled = {"do_sample": True, "temperature": temperature, "top_k": max(top_k, 0), "top_p": top_p}
        out = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=int(limits.max()),
            eos_token_id=stops or None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([OwnLength(width, limits)]),
            **(sampled if temperature > 0 else {"do_sample": False}),
        )
        for job, row in zip(batch, out[:, width:].tolist()):
            job.answer = self._answer(job, row[: job.max_tokens], stops)

    def _answer(self, job: Job, tokens: list[int], stops: list[int]) -> Any:
        end = next((at for at, token in enumerate(tokens) if token in stops), None)
        if end is not None:
            tokens = tokens[: end + 1]
        text = job.text + self._tokenizer.decode(tokens, skip_special_tokens=True)
        outputs = {
            "text_output": np.array([[text.encode()]], dtype=object),
            "finish_reason": np.array([[b"length" if end is None else b"stop"]], dtype=object),
            "num_input_tokens": np.array([[len(job.prompt)]], dtype=np.uint32),
            "num_output_tokens": np.array([[len(tokens)]], dtype=np.uint32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"sampling_parameters={text!r}: give a JSON object")
    return values


def _value(request: Any, name: str) -> Any:
    """An input: the prompt's ids as an array, anything else as one Python value; None when absent."""
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
