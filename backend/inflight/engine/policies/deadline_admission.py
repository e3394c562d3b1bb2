"""Does not start a request whose deadline passed while it waited: computing its prompt would be wasted work.

Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.policies.memory_admission import OutputLengths
from inflight.engine.request import FinishReason, Request

__all__ = ["AdmissionRecord", "DeadlineAdmission"]

# The frontend ends late requests and aborts them here; after this time the engine ends them itself.
_GRACE_SECONDS = 1.0


class AdmissionRecord:
    """Admission's findings, to predict when a request will start.

    Attributes:
        blocked: in the step made last, a request had no room beside the running ones.
        lengths: output lengths of the last requests that ended.
    """

    def __init__(self) -> None:
        self.blocked = False
        self.lengths = OutputLengths()


class DeadlineAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner` for requests in time; late ones are passed over.

    A request that has run before is never late: its output so far is worth keeping.

    Args:
        record: is kept up to date.
    """

    def __init__(self, inner: AdmissionPolicy, clock: Callable[[], float], record: AdmissionRecord) -> None:
        self._inner = inner
        self._clock = clock
        self._record = record

    def step_begins(self, running: Sequence[Request]) -> None:
        self._record.blocked = False

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        if request.deadline is not None and not request.num_preemptions and self._clock() >= request.deadline:
            return NotYet("a free slot, past its deadline", _GRACE_SECONDS)
        answer = self._inner.admits(request, prefix, running, pool)
        self._record.blocked = self._record.blocked or answer is False
        return answer

    def ended(self, request: Request) -> None:
        """An aborted request counts with the length of a random request that outlived it (Kaplan and Meier's estimate):
        under load, long requests are the ones that are aborted, and outputs would seem ever shorter."""
        if request.num_output_tokens:
            aborted, lengths = request.finish_reason is FinishReason.ABORT, self._record.lengths
            lengths.add(lengths.likely(request) if aborted else request.num_output_tokens)
