"""Requests about the model itself: the request parameter `control` names the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from inflight.engine.messages import DumpTrace, Question
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.operator.status import InstanceStatus
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.responder import Responder

__all__ = ["Control", "control_of", "relay"]


class Control:
    """Passes questions to the engine, or to the part of the frontend that answers them.

    Args:
        ask_engine: sends a question to the engine.
        drain_others: tells the other instances that share the engine to drain.
        text_questions: names of the questions that `TokenizeApi` answers.
        others: further questions, with the functions that answer them, which can raise RequestError.
    """

    def __init__(
        self,
        ask_engine: Callable[[Question], Future[Any]],
        status: InstanceStatus,
        drain: Drain,
        drain_others: Callable[[], None] = lambda: None,
        text_questions: tuple[str, ...] = (),
        others: Mapping[str, Callable[[WireRequest], Future[Any]]] | None = None,
    ) -> None:
        self._text_questions = text_questions
        self._answers: dict[str, Callable[[WireRequest], Future[Any]]] = {
            "step_trace": lambda wire: ask_engine(DumpTrace()),
            "stats": lambda wire: status.ask(),
            "drain": lambda wire: _drained(drain, drain_others),
            **(others or {}),
        }

    def answer(self, wire: WireRequest) -> Future[Any] | None:
        """The answer (text or bytes, or a RequestError); None for a request that is not answered here.

        Raises:
            RequestError: INVALID_ARG; an unknown `control`, or wrong parameters of it.
        """
        control = control_of(wire)
        if control is None or control in self._text_questions:
            return None
        if control not in self._answers:
            known = " or ".join(f'"{name}"' for name in (*self._answers, *self._text_questions))
            raise RequestError("INVALID_ARG", f"control={shown(control)}: must be {known}")
        return self._answers[control](wire)


def control_of(wire: WireRequest) -> str | None:
    """The parameter `control`; None if the request asks for text.

    Raises:
        RequestError: INVALID_ARG; it is not a string.
    """
    control = wire.parameters.get("control")
    if control is not None and not isinstance(control, str):
        raise RequestError("INVALID_ARG", f"control={shown(control)}: must be a string")
    return control


def _drained(drain: Drain, drain_others: Callable[[], None]) -> Future[Any]:
    """Drains, and answers with JSON when no request is open any more."""
    drain_others()
    answer: Future[Any] = Future()
    drain.begin("a control request").add_done_callback(
        lambda done: answer.set_result(msgspec.json.encode({"state": "drained", **done.result()}))
    )
    return answer


def relay(answer: Future[Any], output_processor: OutputProcessor, responder: Responder) -> None:
    """Send an answer (text or bytes), or its error, to the client.

    The thread that resolves `answer` can be the one that reads the engine's pipe, which must not block, so the
    sender thread sends the response.
    """
    answer.add_done_callback(lambda done: _send(done, output_processor, responder))


def _send(done: Future[Any], output_processor: OutputProcessor, responder: Responder) -> None:
    try:
        outputs = {"text_output": np.array([done.result()], dtype=np.object_)}
    except RequestError as error:
        output_processor.reject(responder, error)
    else:
        output_processor.respond(responder, outputs)
