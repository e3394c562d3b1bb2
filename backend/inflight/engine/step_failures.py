"""The requests that fail with a step or a row that was not computed correctly.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.deltas import RequestFailed
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.grammars.spec import BEYOND_LIMITS

__all__ = ["lost_requests"]


def lost_requests(
    out: SchedulerOutput, step: StepOutput, rows: Sequence[Request], running: Sequence[Request], pool: KVPool
) -> list[RequestFailed]:
    """The live requests that cannot continue after a step, one entry per sequence.

    A step that was not computed ends with UNAVAILABLE: the same request may succeed if sent again.  A row that failed
    alone ends with INTERNAL: its KV cannot be trusted, and the same request would fail again.  A grammar beyond
    the limits of its library ends with INVALID_ARG.

    Args:
        rows: the requests of `out`, in its order.
    """
    lost: dict[Request, tuple[str, str]] = {}
    if step.failure:
        lost = dict.fromkeys(_with_the_step(out, rows, running, pool), ("UNAVAILABLE", step.failure))
    for row, reason in step.row_failures.items():
        request = rows[row]
        lost[request] = ("INVALID_ARG" if reason.startswith(BEYOND_LIMITS) else "INTERNAL", reason)
        request.num_computed_tokens = 0  # none of its blocks is published when it releases them
        pool.forget(request, 0)
    live = [request for request in lost if request.status is not Status.FINISHED]
    return [RequestFailed(request.request_id, *lost[request]) for request in live]


def _with_the_step(
    out: SchedulerOutput, rows: Sequence[Request], running: Sequence[Request], pool: KVPool
) -> list[Request]:
    """The requests of a step that was not computed, and running requests that share blocks which it was to compute.

    A request that shares them was admitted to the step that was launched ahead, or is a row of this one.  Blocks
    that were not computed leave the prefix cache, and no request counts them as computed.
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
    return list(lost)
