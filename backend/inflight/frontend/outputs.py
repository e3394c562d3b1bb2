"""One sequence's progress and the output tensors of a response.  No torch, no Triton."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from inflight.engine.messages import SequenceDelta, TokenLogprobs
from inflight.frontend.contract import GenerationRequest
from inflight.frontend.text import IncrementalDetokenizer, StopChecker, Tokenizer

__all__ = ["SequenceOutput", "response_outputs"]

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's servers write this


class SequenceOutput:
    """Output of one of a request's n sequences: all counted so far, and what was not sent yet.

    Attributes:
        finish_reason: "stop" or "length" when ended, else None.
        stop_reason: the stop string or stop token id that ended it.
        ended_by_stop: ended by a stop string, which only the frontend sees.
        num_tokens: output tokens so far, the one that ended it included.
        cumulative_logprob: sum over them, 0 unless the engine was asked for log probabilities.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._stop_from = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._keeps_logprobs = request.shows_logprobs
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.ended_by_stop = False
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.text = request.prepend_text
        self.new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []

    def advance(self, delta: SequenceDelta) -> None:
        """Take what a step added; ignored once the sequence has ended."""
        if self.finish_reason is not None:
            return
        token_ids = delta.token_ids
        # The token that ended the sequence counts, and is text only where the request says so.
        hides_last = delta.stop_token is not None and not self._shows_stop_token
        shown = token_ids[:-1] if hides_last else token_ids
        taken = len(token_ids)
        if self._stop is None:
            self.text += self._detokenizer.push(shown) if shown else ""
        else:
            cut = self._push_until_stop(shown, self._stop)
            taken = taken if cut is None else cut
        self._count(token_ids[:taken], (delta.logprobs or [])[:taken])
        if self.ended_by_stop:
            self.finish_reason = "stop"
        elif delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_token
            self._flush()

    def _push_until_stop(self, token_ids: list[int], stop: StopChecker) -> int | None:
        """Token by token, so that tokens behind a match are not counted; how many were taken on one."""
        for number, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push([token_id])
            if self.num_tokens + number <= self._stop_from:  # as in vLLM: no stop within min_tokens
                self.text += text
                continue
            shown, match = stop.push(text)
            self.text += shown
            if match is not None:
                self.ended_by_stop, self.stop_reason = True, match
                return number
        return None

    def _flush(self) -> None:
        rest = self._detokenizer.flush()
        if self._stop is None:
            self.text += rest
            return
        shown, match = self._stop.push(rest)
        self.text += shown
        if match is not None:
            self.finish_reason, self.stop_reason = "stop", match
        else:
            self.text += self._stop.flush()

    def _count(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        self.num_tokens += len(token_ids)
        self.new_token_ids += token_ids
        self.cumulative_logprob += sum(entry[0][1] for entry in logprobs)
        if self._keeps_logprobs:
            self.new_logprobs += logprobs

    def take_text(self) -> str:
        text, self.text = self.text, ""
        return text

    def take_token_ids(self) -> list[int]:
        ids, self.new_token_ids = self.new_token_ids, []
        return ids

    def take_logprobs(self) -> list[TokenLogprobs]:
        logprobs, self.new_logprobs = self.new_logprobs, []
        return logprobs


def response_outputs(
    request: GenerationRequest,
    sequences: Sequence[SequenceOutput],
    tokenizer: Tokenizer,
    prompt_logprobs: list[TokenLogprobs] | None,
) -> dict[str, np.ndarray]:
    """Everything not sent yet as output tensors, one element a sequence; marks it as sent.

    Args:
        prompt_logprobs: one entry a prompt token on the response that carries them, else None.
    """
    returns = request.returns
    outputs: dict[str, np.ndarray] = {"text_output": _texts([sequence.take_text() for sequence in sequences])}
    if "return_finish_reason" in returns:
        outputs["finish_reason"] = _texts([str(sequence.finish_reason) for sequence in sequences])
    if "return_cumulative_logprob" in returns:
        outputs["cumulative_logprob"] = np.array([s.cumulative_logprob for s in sequences], dtype=np.float32)
    if "return_logprobs" in returns:
        entries = [s.take_logprobs() for s in sequences]
        outputs["logprobs"] = _texts(
            [_logprobs_json(tokenizer, entry) if request.shows_logprobs else "null" for entry in entries]
        )
    if "return_num_input_tokens" in returns:
        outputs["num_input_tokens"] = np.array([len(request.prompt_token_ids)], dtype=np.uint32)
    new_token_ids = [sequence.take_token_ids() for sequence in sequences]
    counts = np.array([len(ids) for ids in new_token_ids], dtype=np.uint32)
    if "return_num_output_tokens" in returns:
        outputs["num_output_tokens"] = counts
    if "return_token_ids" in returns:
        outputs["token_ids"] = np.array([i for ids in new_token_ids for i in ids], dtype=np.int64)
        outputs["token_counts"] = counts
    if prompt_logprobs is not None:
        outputs["prompt_logprobs"] = _texts([_logprobs_json(tokenizer, prompt_logprobs)])
    return outputs


def _texts(values: list[str]) -> np.ndarray:
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)


def _logprobs_json(tokenizer: Tokenizer, entries: list[TokenLogprobs]) -> str:
    """vllm_backend's form: per token an object of id -> logprob, rank, text; null where there is none."""
    rows: list[dict[str, Any] | None] = []
    for entry in entries:
        row = {
            str(token_id): {
                "logprob": logprob if math.isfinite(logprob) else _LOWEST_LOGPROB,
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in entry
        }
        rows.append(row or None)
    return json.dumps(rows)
