"""A checked request: the message for the engine, and what only the frontend needs.  No torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from inflight.engine.messages import AddRequest
from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.request.resume import SequenceEnd
from inflight.frontend.request.trace_context import RequestTrace

__all__ = ["ParsedRequest"]


@dataclass(slots=True)
class ParsedRequest:
    """A checked request: the message for the engine, and what only the frontend needs.

    A new field for the engine is added to `AddRequest`, and to the parser, which fills it.

    Attributes:
        engine_request: crosses the pipe as it is; its `request_id` is 0 until `with_id`.
        stream: one response per new text, else one at the end.
        prepend_text: put before the first text of each sequence: "" or the prompt.
        returns: names of the `return_*` flags that are set.
        shows_logprobs: the client requested `logprobs` itself.
        timeout: seconds from arrival to the deadline; None: no deadline.
        cumulative_logprobs: sums over `engine_request.output_token_ids`, one per sequence; empty: all 0.
        ends: how each sequence ended with its `output_token_ids`, None if it did not; empty: none did.
        cumulative: each response repeats the content of the earlier ones.
        separate: each response has one sequence, as TensorRT-LLM's do.
        name: the client's request id, for the log; "" for none.
        trace: for its span; None: it has none.
        quiet: its cancellation is not logged: it is one of the prompts of a request for vectors, and not the first.
        adapter: the files of its adapter, which stay as long as this object; None: it has none.
        checkpoint_id: of the checkpoint that computes the output; None: unknown.
    """

    engine_request: AddRequest
    stream: bool = False
    prepend_text: str = ""
    returns: frozenset[str] = frozenset()
    shows_logprobs: bool = False
    timeout: float | None = None
    cumulative_logprobs: list[float] = field(default_factory=list)
    ends: list[SequenceEnd | None] = field(default_factory=list)
    cumulative: bool = False
    separate: bool = False
    name: str = ""
    trace: RequestTrace | None = None
    quiet: bool = False
    adapter: KeptAdapter | None = None
    checkpoint_id: str | None = None

    def with_id(self, request_id: int) -> ParsedRequest:
        """The same request with the engine's id."""
        return replace(self, engine_request=msgspec.structs.replace(self.engine_request, request_id=request_id))
