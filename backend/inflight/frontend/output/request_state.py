"""One open request: its output so far, and the responder that sends it to the client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import numpy as np

from inflight.engine.deltas import SequenceDelta, SequenceTimes
from inflight.engine.messages import AddRequest
from inflight.frontend.errors import RequestError
from inflight.frontend.output.inbox import Inbox, TokenRun
from inflight.frontend.output.response_tensors import (
    SequenceOutput,
    response_outputs,
    sequence_outputs,
    spelling_tokenizer,
)
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.responder import Responder
from inflight.frontend.text.logprobs_json import entry_texts
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["RequestState"]


class RequestState:
    """An open request and its responder.  Owned by the sender thread.

    Attributes:
        request_id: the engine's id of the request.
        sequences: its n outputs.
        inbox: output that `sequences` have not processed yet.
        last_act: ends the stream early, once the inbox is empty: a failure or a cancellation; None: no early end.
        prompt_logprobs: the JSON of each token that has arrived, until they are sent; None if not requested.
        num_cached_tokens: prompt tokens that the prefix cache served when it first ran; None until then.
        pooled: the vector of a request with pooling, float32, once it has arrived.
        times: what the engine reports about sequences of a traced request, by index.
        admitted_time: `time.monotonic()` seconds when a traced request first ran; None until its first token.
        settled: the metrics include its end, so its last response can be sent.
        sent_time, due: `time.monotonic()` seconds of its last response, and of the waiting one (0.0: none waits).
        early: likewise, until when further tokens wait in the inbox without a look at pacing; 0.0: none do.
        paused: the engine was told to drop it until its inbox is empty (`Backpressure`).
        stopped: the engine has dropped it.
        closed: its FINAL flag was sent.
        dropped: the cancellation thread gave it up; its end is queued.
        arrival, deadline: `time.monotonic()` seconds; a `deadline` of None is none.
        first_token_time: `time.monotonic()` seconds, None until then.
        end_time: likewise, of its last token; None if it ends with an error.
    """

    def __init__(self, request: ParsedRequest, responder: Responder, tokenizer: Tokenizer, interval: int) -> None:
        message = request.engine_request
        self.request = request
        self.request_id = message.request_id
        self.responder = responder
        self.arrival = time.monotonic() if message.arrival is None else message.arrival
        self.deadline = message.deadline
        self.sequences = sequence_outputs(request, tokenizer)
        self.inbox = Inbox()
        self.last_act: Callable[[], None] | None = None
        self.prompt_logprobs: list[str] | None = [] if "return_prompt_logprobs" in request.returns else None
        self.num_cached_tokens: int | None = None
        self.times: dict[int, SequenceTimes] = {}
        self.pooled: bytes | None = None
        self.admitted_time: float | None = None
        self.settled = False
        self.sent_time = self.due = self.early = 0.0
        self.paused = self.stopped = False
        self.closed = False
        self.dropped = False
        self.first_token_time: float | None = None
        self.end_time: float | None = None
        self._num_prompt_tokens = len(message.prompt_token_ids)
        self._spelling_tokenizer = spelling_tokenizer(request, tokenizer)
        self._interval = interval
        self._num_sent_tokens = 0
        # Token ids and logprobs justify a response without new text; so does every token if nothing is detokenised.
        self._sends_tokens = not message.params.detokenize or bool(
            {"return_token_ids", "return_logprobs", "return_log_probs"} & request.returns
        )
        self._stopped: set[int] = set()  # sequences that `take_inbox` has reported

    @property
    def engine_request(self) -> AddRequest:
        """The message for the engine, without the sequences that have ended."""
        message = self.request.engine_request
        if not message.output_token_ids:
            return message
        outputs = [None if s.ended else given for s, given in zip(self.sequences, message.output_token_ids)]
        return msgspec.structs.replace(message, output_token_ids=outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated for this stream in all sequences, without the output that it began with."""
        return sum([sequence.num_generated_tokens for sequence in self.sequences])

    @property
    def num_new_tokens(self) -> int:
        """Tokens that no response has contained yet, including one for each delta in the inbox."""
        return self.inbox.num_waiting + self.num_output_tokens - self._num_sent_tokens

    @property
    def has_started(self) -> bool:
        """Whether a response with tokens was sent."""
        return self._num_sent_tokens > 0

    @property
    def may_wait(self) -> bool:
        """Whether a delta can stay in the inbox for a while: not the first one, and not if there are stop strings."""
        return self._num_sent_tokens > 0 and not self.request.engine_request.params.stop

    @property
    def finished(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the sequences that have not ended."""
        return [sequence.index for sequence in self.sequences if not sequence.ended]

    @property
    def has_new_output(self) -> bool:
        """Whether a streaming client should get a response now."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self._num_prompt_tokens:
            return False  # the first response contains all of them
        if (
            self._interval > 1
            and self._num_sent_tokens
            and self.num_output_tokens - self._num_sent_tokens < self._interval
        ):
            return False
        return any(map(self._has_new_output, self.sequences))

    def _has_new_output(self, sequence: SequenceOutput) -> bool:
        return bool(sequence.text or (self._sends_tokens and sequence.new_token_ids))

    def parts(self, final: bool) -> list[list[SequenceOutput]]:
        """The sequences of each response to send now; `final`: these are the last responses of the stream."""
        if not self.request.separate:
            return [self.sequences]
        changed = [s for s in self.sequences if (not s.end_sent if final else self._has_new_output(s))]
        return [[sequence] for sequence in changed or self.sequences[-1:]]

    def take_inbox(self, seconds: float = math.inf) -> list[int]:
        """Process the deltas in the inbox, at least one, for about `seconds`; the others stay.

        Returns:
            Indices of the sequences that a stop string ended and that still run in the engine; each is returned once.
        """
        inbox, stopped = self.inbox, []
        late = time.monotonic() + seconds if len(inbox) > 1 else math.inf
        while inbox:
            entry = inbox.take()
            sequence = self.sequences[entry.index]
            if isinstance(entry, TokenRun):
                sequence.advance_each(entry.token_ids)
            else:
                self._take_delta(entry, sequence)
            if sequence.ended_by_stop and entry.index not in self._stopped:
                self._stopped.add(entry.index)
                if isinstance(entry, TokenRun) or entry.finish_reason is None:
                    stopped.append(entry.index)
            if late < math.inf and time.monotonic() >= late:
                break
        return stopped

    def _take_delta(self, delta: SequenceDelta, sequence: SequenceOutput) -> None:
        if self.prompt_logprobs is not None and delta.prompt_logprobs:
            self.prompt_logprobs += entry_texts(delta.prompt_logprobs, self._spelling_tokenizer)
        if self.num_cached_tokens is None:  # the first sequence that runs reports the prompt's
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.pooled is not None:
            self.pooled = delta.pooled
        if delta.times is not None:
            self.times[delta.index] = delta.times
            self.admitted_time = self.admitted_time or delta.times.admitted
        sequence.advance(delta)

    def rest(self) -> AddRequest | None:
        """The message with which another engine continues after the last delta; None if nothing is left.

        Call it when the inbox is empty.
        """
        message = self.request.engine_request
        outputs = [None if sequence.ended else sequence.token_ids.tolist() for sequence in self.sequences]
        if all(output is None for output in outputs):
            return None
        params = message.params
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self._num_prompt_tokens:
            self.prompt_logprobs = []  # the other engine starts with the first one again
        elif params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        attached = message.attached
        if attached is not None and attached.resumed:  # what another server has of it is there by now
            attached = msgspec.structs.replace(attached, resumed=False)
        changes = {"params": params, "arrival": self.arrival, "output_token_ids": outputs, "attached": attached}
        return msgspec.structs.replace(message, **changes, replayed=True)

    def outputs(self, sequences: list[SequenceOutput]) -> dict[str, np.ndarray]:
        """The tensors of a response with these sequences; what they contain counts as sent."""
        if self.pooled is not None:
            return {"pooled": np.frombuffer(self.pooled, dtype=np.float32)}
        return response_outputs(self.request, sequences, self._take_prompt_logprobs(), self.num_cached_tokens)

    def sent(self) -> None:
        """A response with everything so far was sent."""
        self._num_sent_tokens = self.num_output_tokens

    def _take_prompt_logprobs(self) -> list[str] | None:
        """For the first response; None from then on."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return logprobs

    def late_error(self) -> RequestError:
        """The error of a stream that missed its deadline."""
        message = (
            f"deadline exceeded: the request's timeout of {self.request.timeout:g} s ran out "
            f"after {self.num_output_tokens} output tokens"
        )
        return RequestError("CANCELLED", message)
