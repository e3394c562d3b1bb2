"""One sequence's progress and the output tensors of a response.  No torch, no Triton."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.resume import SequenceEnd
from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.logprobs_json import entry_texts, joined_texts
from inflight.frontend.text.stop_strings import StopChecker, StopStrings
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["SequenceOutput", "response_outputs", "sequence_outputs", "spelling_tokenizer"]

_RECENT_TOKENS = 64  # several times the tokens that the detokenizer holds back


class SequenceOutput:
    """Output of one of a request's n sequences: counts so far, and output that was not sent yet.

    A request can begin with output (`AddRequest.output_token_ids`).  Text, stop strings and counts then
    continue as if this object had processed these tokens itself, and none of them is sent again.

    Args:
        index: its place among the request's sequences.
        shared: what the request's sequences share; made here if None.

    Attributes:
        ended: no more output follows: it ended here, or before its request arrived here.
        finish_reason: "stop" or "length" if it ended here, or with the output that it began with; else None.
        stop_reason: the stop string or stop token id that ended it.
        ended_by_stop: a stop string ended it; only the frontend sees these.
        token_ids: int32[num_tokens], output tokens so far, including the one that ended it.
        num_generated_tokens: the number of them that the request did not begin with.
        cumulative_logprob: sum over all of them; 0 unless the engine was asked for log probabilities.
        text, new_token_ids: output that was not sent yet.
        new_logprobs, new_logprob_values: log probabilities that were not sent yet, if the request asks for them: the
            JSON of each token, and the number of the chosen token.
        index: its place among the request's sequences.
        end_sent: the response with its finish reason was made, here or elsewhere.
    """

    def __init__(
        self, request: ParsedRequest, tokenizer: Tokenizer, index: int = 0, shared: _Shared | None = None
    ) -> None:
        message = request.engine_request
        params = message.params
        shared = shared or _Shared(request, tokenizer)
        self._detokenizer = shared.detokenizer.another()
        include = params.include_stop_str_in_output
        self._stop = None if shared.stop is None else StopChecker(shared.stop, include)
        self._stop_from = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._spelling_tokenizer = spelling_tokenizer(request, tokenizer)
        self._shows_logprobs = request.shows_logprobs and "return_logprobs" in request.returns
        self._shows_values = "return_log_probs" in request.returns
        self._sent = _Sent() if request.cumulative else None
        self.ended = False
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.ended_by_stop = False
        self.token_ids = array("i")
        self.num_generated_tokens = 0
        self.cumulative_logprob = 0.0
        self.text = ""
        self.new_token_ids: list[int] = []
        self.new_logprobs: list[str] = []
        self.new_logprob_values: list[float] = []
        self.index = index

        given = message.output_token_ids[index] if message.output_token_ids else []
        self._take_given(message.request_id, given or [], request.ends[index] if request.ends else None)
        self.num_generated_tokens = 0
        self.ended = self.ended or given is None
        self.end_sent = given is None
        if request.cumulative_logprobs:
            self.cumulative_logprob = request.cumulative_logprobs[index]
        if self._sent is not None:
            self._sent.text, self._sent.token_ids = self.text, self.new_token_ids
        self.new_token_ids = []
        self.text = request.prepend_text

    def _take_given(self, request_id: int, token_ids: list[int], end: SequenceEnd | None) -> None:
        """Process output that was generated elsewhere, and ended as `end` says.

        The last tokens one at a time, as most outputs arrive: the text of invalid UTF-8 depends on it.  Without stop
        strings, earlier tokens are processed at once.
        """
        recent = 0 if self._stop is not None else max(0, len(token_ids) - _RECENT_TOKENS)
        if recent:
            self.advance(SequenceDelta(request_id, self.index, token_ids[:recent]))
        for token_id in token_ids[recent:-1]:
            self.advance(SequenceDelta(request_id, self.index, [token_id]))
        if token_ids:
            self.advance(SequenceDelta(request_id, self.index, token_ids[-1:], *(end or ())))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def advance(self, delta: SequenceDelta) -> None:
        """Process the output of a step: one token, several or none.  Ignored once the sequence has ended."""
        if self.ended:
            return
        token_ids = delta.token_ids
        # The token that ended the sequence counts, but is text only if the request says so.
        hides_last = delta.stop_token is not None and not self._shows_stop_token
        shown = token_ids[:-1] if hides_last else token_ids
        taken = len(token_ids)
        if self._stop is None:
            self.text += self._detokenizer.push(shown) if shown else ""
        else:
            cut = self._push_until_stop(shown, self._stop)
            taken = taken if cut is None else cut
        self._count(token_ids[:taken])
        if delta.logprobs is not None:
            self._take_logprobs(delta.logprobs[:taken])
        if self.ended_by_stop:
            self.finish_reason = "stop"
        elif delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_token
            self._flush()
        self.ended = self.finish_reason is not None

    def advance_each(self, token_ids: list[int]) -> None:
        """`advance` with one delta for each of these tokens, which has nothing else."""
        if self.ended:
            return
        if self._stop is None:
            self.text += self._detokenizer.push_each(token_ids)
        elif (cut := self._push_until_stop(token_ids, self._stop)) is not None:
            token_ids, self.finish_reason, self.ended = token_ids[:cut], "stop", True
        self._count(token_ids)

    def _push_until_stop(self, token_ids: list[int], stop: StopChecker) -> int | None:
        """Push token by token: tokens after a match do not count.

        Returns:
            Tokens up to the match, or None without one.
        """
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

    def _count(self, token_ids: list[int]) -> None:
        self.num_generated_tokens += len(token_ids)
        self.token_ids.extend(token_ids)
        self.new_token_ids += token_ids

    def _take_logprobs(self, logprobs: Logprobs) -> None:
        values = logprobs.first_values()
        self.cumulative_logprob += sum(values)
        if self._shows_values:
            self.new_logprob_values += values
        if self._shows_logprobs:
            self.new_logprobs += entry_texts(logprobs, self._spelling_tokenizer)

    def take_text(self) -> str:
        text, self.text = self.text, ""
        if self._sent is None:
            return text
        self._sent.text += text
        return self._sent.text

    def take_token_ids(self) -> list[int]:
        ids, self.new_token_ids = self.new_token_ids, []
        if self._sent is None:
            return ids
        self._sent.token_ids += ids
        return self._sent.token_ids

    def take_logprobs(self) -> list[str]:
        logprobs, self.new_logprobs = self.new_logprobs, []
        if self._sent is None:
            return logprobs
        self._sent.logprobs += logprobs
        return self._sent.logprobs

    def take_logprob_values(self) -> list[float]:
        values, self.new_logprob_values = self.new_logprob_values, []
        if self._sent is None:
            return values
        self._sent.logprob_values += values
        return self._sent.logprob_values


def sequence_outputs(request: ParsedRequest, tokenizer: Tokenizer) -> list[SequenceOutput]:
    """The outputs of a request's n sequences."""
    shared = _Shared(request, tokenizer)
    return [SequenceOutput(request, tokenizer, index, shared) for index in range(request.engine_request.params.n)]


class _Shared:
    """Objects that the sequences of a request share: they are expensive for long prompts and lists.

    Attributes:
        stop: None without stop strings.
        detokenizer: at the start of the output.
    """

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        message, params = request.engine_request, request.engine_request.params
        self.stop = StopStrings(params.stop) if params.stop else None
        self.detokenizer: IncrementalDetokenizer | _NoText = (
            IncrementalDetokenizer(tokenizer, message.prompt_token_ids, params.skip_special_tokens)
            if params.detokenize
            else _NoText()
        )


@dataclass(slots=True)
class _Sent:
    """The content of earlier responses, for cumulative responses."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    logprob_values: list[float] = field(default_factory=list)


class _NoText:
    """Replaces the `IncrementalDetokenizer` of a request that wants no text."""

    def another(self) -> _NoText:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def push_each(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def spelling_tokenizer(request: ParsedRequest, tokenizer: Tokenizer) -> Tokenizer | None:
    """The tokenizer for the texts of log probabilities; None if the request wants no text."""
    return tokenizer if request.engine_request.params.detokenize else None


def response_outputs(
    request: ParsedRequest,
    sequences: Sequence[SequenceOutput],
    prompt_logprobs: Sequence[str] | None,
    num_cached_tokens: int | None = None,
) -> dict[str, np.ndarray]:
    """The output that was not sent yet as tensors, one element per sequence; marks it as sent.

    Args:
        sequences: all of the request's, or one of them if each has responses of its own.
        prompt_logprobs: the JSON of each prompt token, for the response that contains them; else None.
        num_cached_tokens: prompt tokens that the prefix cache served; None if no engine has run the request.
    """
    returns = request.returns
    outputs: dict[str, np.ndarray] = {"text_output": _texts([sequence.take_text() for sequence in sequences])}
    new_token_ids = [sequence.take_token_ids() for sequence in sequences]
    if returns:
        _add_per_sequence(outputs, request, sequences)
        _add_counts(outputs, returns, new_token_ids)
    if "return_num_input_tokens" in returns:
        outputs["num_input_tokens"] = np.array([len(request.engine_request.prompt_token_ids)], dtype=np.uint32)
    if "return_num_cached_tokens" in returns:
        outputs["num_cached_tokens"] = np.array([num_cached_tokens or 0], dtype=np.uint32)
    if "return_lora_digest" in returns and request.adapter is not None:
        outputs["lora_digest"] = _texts([request.adapter.ref.id])
    if "return_checkpoint_id" in returns and request.checkpoint_id is not None:
        outputs["checkpoint_id"] = _texts([request.checkpoint_id])
    if prompt_logprobs is not None:
        outputs["prompt_logprobs"] = _texts([joined_texts(prompt_logprobs)])
    if request.separate:
        outputs["sequence_index"] = np.array([sequences[0].index], dtype=np.int32)
        outputs["batch_index"] = np.zeros(1, dtype=np.int32)
    for sequence in sequences:
        sequence.end_sent = sequence.ended
    return outputs


def _add_per_sequence(
    outputs: dict[str, np.ndarray], request: ParsedRequest, sequences: Sequence[SequenceOutput]
) -> None:
    """Ends and log probabilities."""
    returns = request.returns
    if "return_finish_reason" in returns:
        outputs["finish_reason"] = _texts([str(sequence.finish_reason) for sequence in sequences])
    if "return_stop_reason" in returns:
        outputs["stop_reason"] = _texts([json.dumps(sequence.stop_reason) for sequence in sequences])
    if "return_cumulative_logprob" in returns:
        outputs["cumulative_logprob"] = np.array([s.cumulative_logprob for s in sequences], dtype=np.float32)
    if "return_logprobs" in returns:
        entries = [sequence.take_logprobs() for sequence in sequences]
        outputs["logprobs"] = _texts([joined_texts(texts) if request.shows_logprobs else "null" for texts in entries])
    if "return_log_probs" in returns:
        outputs["cum_log_probs"] = np.array([s.cumulative_logprob for s in sequences], dtype=np.float32)
        outputs["output_log_probs"] = _padded([sequence.take_logprob_values() for sequence in sequences])


def _add_counts(outputs: dict[str, np.ndarray], returns: Collection[str], new_token_ids: list[list[int]]) -> None:
    counts = np.array([len(ids) for ids in new_token_ids], dtype=np.uint32)
    if "return_num_output_tokens" in returns:
        outputs["num_output_tokens"] = counts
    if "return_token_ids" in returns:
        (ids,) = new_token_ids if len(new_token_ids) == 1 else [list(chain(*new_token_ids))]
        outputs["token_ids"] = np.array(ids, dtype=np.int64)
        outputs["token_counts"] = counts


def _padded(rows: list[list[float]]) -> np.ndarray:
    """float32[n, longest]: the rows, padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.float32)
    for values, row in zip(table, rows):
        values[: len(row)] = row
    return table


def _texts(values: list[str]) -> np.ndarray:
    array = np.empty(len(values), dtype=np.object_)
    for place, value in enumerate(values):  # half the time of `np.array`, which looks for a shape in them
        array[place] = value.encode("utf-8")
    return array
