"""One request under way: what came of it so far, and the way back to its client."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from inflight.engine.messages import AddRequest, SequenceDelta
from inflight.frontend.errors import ErrorCode, RequestError
from inflight.frontend.output.response_tensors import SequenceOutput, sequence_outputs, spelling_tokenizer
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.text.logprobs_json import entry_texts
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["RequestState", "Responder"]


class Responder(Protocol):
    """The way back to one client."""

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        """Send one response; `final` is the FINAL flag.  Raises if the client cannot be reached."""

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send one error response with the FINAL flag."""

    def is_cancelled(self) -> bool:
        """Whether the client gave up; once true, always true."""


class RequestState:
    """A request and its way back.  Owned by the sender thread.

    Attributes:
        request_id: the engine's id of the request.
        sequences: its n outputs.
        inbox: deltas that `sequences` have not taken yet, oldest first.
        last_act: what ends it in place of its last token, once the inbox is empty.
        prompt_logprobs: those that came so far, the JSON of each token, until they are sent; None if not requested.
        num_cached_tokens: prompt tokens that the prefix cache served when it first ran; None until then.
        settled: the metrics know of its end, so that its last response may be sent.
        sent_time, due: `time.monotonic()` seconds of its last response, and of the one that waits (0.0: none does).
        paused, stopped: the engine was told to drop it until its inbox is empty (`Backpressure`); and has done so.
        closed: its FINAL flag was sent.
        dropped: the sweep thread gave it up; its end is on the way.
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
        self.inbox: deque[SequenceDelta] = deque()
        self.last_act: Callable[[], None] | None = None
        self.prompt_logprobs: list[str] | None = [] if "return_prompt_logprobs" in request.returns else None
        self.num_cached_tokens: int | None = None
        self.settled = False
        self.sent_time = self.due = 0.0
        self.paused = self.stopped = False
        self.closed = False
        self.dropped = False
        self.first_token_time: float | None = None
        self.end_time: float | None = None
        self._num_prompt_tokens = len(message.prompt_token_ids)
        self._spelling_tokenizer = spelling_tokenizer(request, tokenizer)
        self._interval = interval
        self._num_sent_tokens = 0
        # Token ids and logprobs are worth a response even if they complete no text; so is a token that gets none.
        self._sends_tokens = not message.params.detokenize or bool(
            {"return_token_ids", "return_logprobs", "return_log_probs"} & request.returns
        )
        self._stopped: set[int] = set()  # sequences that `take_inbox` has reported

    @property
    def engine_request(self) -> AddRequest:
        """What is left for the engine to do: a sequence that has ended takes no part."""
        message = self.request.engine_request
        if not message.output_token_ids:
            return message
        outputs = [None if s.ended else given for s, given in zip(self.sequences, message.output_token_ids)]
        return msgspec.structs.replace(message, output_token_ids=outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated for this stream, all sequences together; those it began with are not among them."""
        return sum(sequence.num_generated_tokens for sequence in self.sequences)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that no response contained yet, those in the inbox included; all before the first response."""
        return len(self.inbox) + self.num_output_tokens - self._num_sent_tokens

    @property
    def has_started(self) -> bool:
        """Whether a response with tokens was sent."""
        return self._num_sent_tokens > 0

    @property
    def may_wait(self) -> bool:
        """Whether a delta may stay in the inbox for a while: it begins no stream, and ends none by a stop string."""
        return self._num_sent_tokens > 0 and not self.request.engine_request.params.stop

    @property
    def finished(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the sequences that have not ended."""
        return [sequence.index for sequence in self.sequences if not sequence.ended]

    @property
    def has_news(self) -> bool:
        """Whether a streaming client should get a response now."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self._num_prompt_tokens:
            return False  # they go with the first response, complete
        if (
            self._interval > 1
            and self._num_sent_tokens
            and self.num_output_tokens - self._num_sent_tokens < self._interval
        ):
            return False
        return any(map(self._is_news, self.sequences))

    def _is_news(self, sequence: SequenceOutput) -> bool:
        return bool(sequence.text or (self._sends_tokens and sequence.new_token_ids))

    def parts(self, final: bool) -> list[list[SequenceOutput]]:
        """The sequences that share a response, response by response; `final`: the last ones of the stream."""
        if not self.request.separate:
            return [self.sequences]
        told = [s for s in self.sequences if (not s.end_sent if final else self._is_news(s))]
        return [[sequence] for sequence in told or self.sequences[-1:]]

    def take_inbox(self, seconds: float = math.inf) -> list[int]:
        """Process the deltas that came, at least one; those that are left after `seconds` stay in the inbox.

        Returns:
            Indices of the sequences that a stop string ended and that still run in the engine; each once.
        """
        inbox, stopped = self.inbox, []
        late = time.monotonic() + seconds if len(inbox) > 1 else math.inf
        while inbox:
            delta = inbox.popleft()
            if self.prompt_logprobs is not None and delta.prompt_logprobs:
                self.prompt_logprobs += entry_texts(delta.prompt_logprobs, self._spelling_tokenizer)
            if self.num_cached_tokens is None:  # of several sequences, the first that runs brings the prompt's
                self.num_cached_tokens = delta.num_cached_tokens
            sequence = self.sequences[delta.index]
            sequence.advance(delta)
            if sequence.ended_by_stop and delta.index not in self._stopped:
                self._stopped.add(delta.index)
                if delta.finish_reason is None:
                    stopped.append(delta.index)
            if late < math.inf and time.monotonic() >= late:
                break
        return stopped

    def rest(self) -> AddRequest | None:
        """What another engine must be sent to go on where the deltas end that came; None if there is nothing left.

        Call it when `take_inbox` has taken them all.
        """
        message = self.request.engine_request
        outputs = [None if sequence.ended else sequence.token_ids.tolist() for sequence in self.sequences]
        if all(output is None for output in outputs):
            return None
        params = message.params
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self._num_prompt_tokens:
            self.prompt_logprobs = []  # the other engine begins with the first again
        elif params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            message, params=params, arrival=self.arrival, output_token_ids=outputs, replayed=True
        )

    def sent(self) -> None:
        """Everything so far is on its way to the client."""
        self._num_sent_tokens = self.num_output_tokens

    def take_prompt_logprobs(self) -> list[str] | None:
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
