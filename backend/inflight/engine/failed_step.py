"""What a step that was not computed takes along.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput

__all__ = ["lost_requests"]


def lost_requests(
    out: SchedulerOutput, rows: Sequence[Request], running: Sequence[Request], pool: KVPool
) -> list[Request]:
    """The live requests that cannot go on: those of the step, and those that share blocks which it was to compute.

    Whoever shares them was admitted to the step that was launched ahead, or is a row of this one.  What was
    not computed leaves the prefix cache, and nobody counts it as computed.

    Args:
        rows: the requests of `out`, in its order.
    """
    lost = dict.fromkeys(rows)
    blocks: set[int] = set()
    for request, computed in zip(rows, out.num_computed_tokens):
        blocks.update(pool.forget(request, computed))
        request.num_computed_tokens = min(request.num_computed_tokens, computed)
    for request in running:
        shared = next((index for index, block in enumerate(request.block_ids) if block in blocks), None)
        if shared is not None:
            lost[request] = None
            request.num_computed_tokens = min(request.num_computed_tokens, shared * pool.block_size)
            pool.forget(request, request.num_computed_tokens)
    return [request for request in lost if request.status is not Status.FINISHED]
