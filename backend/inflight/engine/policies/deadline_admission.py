"""A request whose deadline passed while it waited is not started: its prompt would cost time that nobody gains from.

Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.policies.memory_admission import OutputLengths
from inflight.engine.request import Request

__all__ = ["InTimeAdmission"]

# The frontend ends late requests, and aborts them here; if it has not within this time, the engine does.
_GRACE_SECONDS = 1.0


class InTimeAdmission:
    """Asks another policy about requests that are in time, and passes over the late ones.

    Whoever has run before is not late: its output so far is worth something.

    Attributes:
        blocked: in this step a request did not find room beside the running ones.
        lengths: of the outputs of the last requests that ended.
        on_end: is told of each request that ran and ended, by itself or aborted.
    """

    def __init__(self, inner: AdmissionPolicy, clock: Callable[[], float]) -> None:
        self.inner = inner
        self._clock = clock
        self.blocked = False
        self.lengths = OutputLengths()
        self.on_end: Callable[[Request], None] = lambda request: None
        self.admitted = inner.admitted
        self.left = inner.left

    def ended(self, request: Request) -> None:
        """One that was aborted counts as long as those that outlived it did (Kaplan and Meier's estimate, by a draw):
        under load it is the long ones that are aborted, and what ends would seem ever shorter."""
        by_itself = request.num_tokens >= request.max_total_tokens or request.token_ids[-1] in request.stop_ids
        self.lengths.add(request.num_output_tokens if by_itself else self.lengths.likely(request))
        self.on_end(request)
        self.inner.ended(request)

    def begin(self) -> None:
        self.blocked = False
        self.inner.begin()

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        if request.deadline is not None and not request.num_preemptions and self._clock() >= request.deadline:
            return NotYet("a free slot, past its deadline", _GRACE_SECONDS)
        answer = self.inner.admits(request, prefix, running, pool)
        self.blocked = self.blocked or answer is False
        return answer
