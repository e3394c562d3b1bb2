"""The prompts of one request for vectors: each is a request of the engine, and all have one response.

A prompt is scheduled, cancelled, late and replayed as any other request.  The first one that fails ends the group: its
client gets that error, and the others count as cancelled.  No torch, no Triton.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from inflight.frontend.errors import ErrorCode
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.pooled_request import PooledRequest
from inflight.frontend.responder import Responder

__all__ = ["PooledGroup", "PooledGroups"]

_CHECK_SECONDS = 0.05  # each check asks Triton


class PooledGroup:
    """Collects the vectors of a request.  The sender thread calls `take` and `fail`.

    Args:
        responder: of the client.
    """

    def __init__(self, request: PooledRequest, responder: Responder) -> None:
        self._request = request
        self._responder = responder
        self._vectors: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()  # guards the next one
        self._ended = False
        self._cancelled, self._next_check = False, 0.0

    def take(self, place: int, vector: np.ndarray) -> None:
        """The vector of a prompt; the last one sends the response."""
        self._vectors[place] = vector
        if len(self._vectors) == len(self._request.members) and self.end():
            try:
                self._responder.send(self._outputs(), True)
            except BaseException as error:  # the caller fails this prompt, whose group has ended
                self._responder.fail("INTERNAL", f"{type(error).__name__}: {error}")
                raise

    def fail(self, place: int, code: ErrorCode, message: str) -> None:
        """A prompt failed."""
        if not self.end():
            return
        plan = self._request.plan
        if code in ("INVALID_ARG", "INTERNAL") and len(plan.prompts) > 1:
            message = f"inputs[{plan.inputs_of(place)}]: {message}"
        self._responder.fail(code, message)

    def end(self) -> bool:
        """End the group, whose client gets no other response; False if it has ended.  Any thread can call it."""
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def is_cancelled(self) -> bool:
        """Whether its prompts need not be computed any more."""
        now = time.monotonic()
        if not self._ended and not self._cancelled and now >= self._next_check:
            self._cancelled = self._responder.is_cancelled()
            self._next_check = now + _CHECK_SECONDS
        return self._ended or self._cancelled

    def _outputs(self) -> dict[str, np.ndarray]:
        plan, returns = self._request.plan, self._request.returns
        results = plan.results([self._vectors[place] for place in range(len(plan.prompts))])
        if self._request.as_text:
            outputs = {"text_output": _texts([json.dumps(results[0].tolist())])}
        else:
            outputs = {"pooled": results, "pooled_token_counts": np.array(plan.counts, dtype=np.int32)}
            if plan.labels:
                outputs["labels"] = _texts(plan.labels)
        if "return_num_input_tokens" in returns:
            outputs["num_input_tokens"] = np.array([sum(plan.counts)], dtype=np.uint32)
        if "return_num_output_tokens" in returns:
            outputs["num_output_tokens"] = np.zeros(1, dtype=np.uint32)
        return outputs


class _Member:
    """The `Responder` of one prompt."""

    def __init__(self, group: PooledGroup, place: int) -> None:
        self._group = group
        self._place = place
        self.is_cancelled = group.is_cancelled

    def prepare(self, outputs: dict[str, np.ndarray], final: bool) -> Callable[[], None]:
        return partial(self.send, outputs, final)

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        self._group.take(self._place, outputs["pooled"])

    def fail(self, code: ErrorCode, message: str) -> None:
        self._group.fail(self._place, code, message)


class PooledGroups:
    """Opens the streams of requests for vectors.

    Args:
        read: checks and tokenises; raises RequestError.
        open_stream: hands a prompt to the engine.
    """

    def __init__(
        self, read: Callable[[WireRequest], PooledRequest], open_stream: Callable[[ParsedRequest, Responder], None]
    ) -> None:
        self._read = read
        self._open_stream = open_stream

    def open(self, wire: WireRequest, responder: Responder) -> None:
        """Hand a request to the engine; its response follows through `responder`.  Raises RequestError."""
        request = self._read(wire)
        group = PooledGroup(request, responder)
        try:
            for place, member in enumerate(request.members):
                self._open_stream(member, _Member(group, place))
        except BaseException:
            if group.end():
                raise  # the caller answers, and the prompts before this one count as cancelled


def _texts(values: list[str]) -> np.ndarray:
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)
