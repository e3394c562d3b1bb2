"""Choosing every row's token in one kernel launch on a GPU, with nothing for the host to decide.

One program handles one row and reads it as few times as its parameters allow:

    greedy          once     each lane (a place in the block that moves along the row) keeps its best
    plain random    once     the same, for logit / temperature + Gumbel noise; then the winners of
                             the lanes race again by the exact formula used on the CPU
    top_k           twice    the k-th largest of the lanes' maxima is a lower bound for the k-th
                             logit; the few tokens above it are listed, the rest works on that list
    top_p, min_p    twice    the same with a few hundred of the lanes' maxima; the second pass also
                             sums the weights, which shows whether the list contains the nucleus
                    or more  if it does not: a race over the whole row, then passes that weigh what
                             is above the winner; a winner outside the nucleus is replaced by the
                             winner among what is above it

Entries are ordered by rank, one int64: by falling logit, then by rising token id.  Masses are
sums of fixed-point weights and hence the same in any order of summation; noise and weights use
correctly rounded operations only (`gpu_math`).  A row's token is therefore a function of its
logits, parameters, seed and position alone.  It differs from the CPU's only if two scores, or a
mass and its bound, agree to about 1 part in 10**7, or if the two best scores are in one lane and
within 2e-4 of each other, which a lane cannot tell apart.  Each is estimated to happen for one
token in ten million.

A row whose largest logit is not finite gets no token (`sampling/unusable.py`): the first pass takes a
maximum that keeps NaN, at no cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.gpu_math import (
    exp_of_negative,
    negative_exponential,
    order_key,
    rough_gumbel,
    uniform,
)
from inflight.sampling import unusable
from inflight.sampling.metadata import Kind
from inflight.sampling.noise import token_hashes

__all__ = ["choose"]

# Two programs share the 64 K registers of a multiprocessor: one computes while the other waits for memory.
BLOCK = 2048
NUM_WARPS = 16
NUM_STAGES = 3
MAX_REGISTERS = 64
# Capacity of a row's list, in tokens; if ties or a large top_k leave more, the row itself is read.
CAPACITY = 4096

_LOWEST_RANK = tl.constexpr(-(2**63))
_HIGHEST_RANK = tl.constexpr(2**63 - 1)
_LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
_NOWHERE = tl.constexpr(2**31 - 1)
NO_TOKEN = tl.constexpr(unusable.NO_TOKEN)


@triton.jit
def _rank(x, ids):
    """int64 that is greater for a greater logit and, among equal logits, for a lower token id."""
    return (order_key(x).to(tl.int64) << 32) + (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _first_best(scores, ids, valid):
    """The lowest valid id with the best score, or _NOWHERE."""
    scores = tl.where(valid, scores, -float("inf"))
    return tl.min(tl.where(valid & (scores == tl.max(scores, 0)), ids, _NOWHERE), 0)


@triton.jit
def _without_nan(lane_maxima):
    """The lanes with -inf in place of NaN; and the largest of them, NaN if any is."""
    spoiled = lane_maxima != lane_maxima
    numbers = tl.where(spoiled, -float("inf"), lane_maxima)
    return numbers, tl.where(tl.max(spoiled.to(tl.int32), 0) > 0, float("nan"), tl.max(numbers, 0))


@triton.jit
def _lane_maxima(row, vocab_size, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Each lane's largest logit (-inf, if one is NaN) and its first place; the largest of the row, NaN if one is."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    places = lanes
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + lanes, mask=start + lanes < vocab_size, other=-float("inf")).to(tl.float32)
        places = tl.where(x > largest, start + lanes, places)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    largest, top = _without_nan(largest)
    return largest, places, top


@triton.jit
def _weight(x, kept, scale, largest, min_p):
    """Weight relative to the largest; 0 where not kept or below min_p."""
    weight = exp_of_negative(x * scale - largest)
    return tl.where(kept & (weight >= min_p), weight, 0.0)


@triton.jit
def _settle(values, ids_ptr, places, valid, scale, largest, hashes, key, offset, LISTED: tl.constexpr):
    """Race the entries at `places` by the CPU's formula, log(1 - u) / weight.  Returns the winner's id and rank."""
    x = tl.load(values + places, mask=valid, other=-float("inf")).to(tl.float32)
    ids = places
    if LISTED:
        ids = tl.load(ids_ptr + places, mask=valid, other=0)
    u = uniform(tl.load(hashes + ids, mask=valid, other=0), key, offset)
    scores = tl.div_rn(negative_exponential(u), exp_of_negative(x * scale - largest))
    winner = _first_best(scores, ids, valid)
    return winner, tl.max(tl.where(valid & (ids == winner), _rank(x, ids), _LOWEST_RANK), 0)


@triton.jit
def _race(row, vocab_size, scale, hashes, key, offset, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Race the whole vocabulary.  Returns the winner's id and rank, and the largest logit, NaN if one is."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    places = lanes
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        inside = start + lanes < vocab_size
        x = tl.load(row + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        u = uniform(tl.load(hashes + start + lanes, mask=inside, other=0), key, offset)
        scaled = x * scale
        score = scaled + rough_gumbel(u)
        places = tl.where(score > best, start + lanes, places)
        best = tl.where(score > best, score, best)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    largest, top = _without_nan(largest)
    heaviest = tl.maximum(tl.max(largest, 0) * scale, _LOWEST_FLOAT)
    winner, rank = _settle(row, row, places, places < vocab_size, scale, heaviest, hashes, key, offset, False)
    return winner, rank, top


@triton.jit
def _weigh(
    values, ids_ptr, size, scale, largest, min_p, floor, pivot, hashes, key, offset,
    MASS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One pass over the kept entries: those with rank >= floor and weight >= min_p.

    Returns:
        Mass of all of them and of those above the pivot, in units of 1 / MASS; id and rank of the
        winner of a race among those above the pivot.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    above = tl.zeros((BLOCK,), tl.int64)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    places = lanes
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        here = start + lanes
        inside = here < size
        x = tl.load(values + here, mask=inside, other=-float("inf")).to(tl.float32)
        ids = here
        if LISTED:
            ids = tl.load(ids_ptr + here, mask=inside, other=0)
        rank = _rank(x, ids)
        weight = _weight(x, inside & (rank >= floor), scale, largest, min_p)
        mass = (weight * MASS).to(tl.int64)
        heavier = rank > pivot
        total += mass
        above += tl.where(heavier, mass, 0)
        u = uniform(tl.load(hashes + ids, mask=inside, other=0), key, offset)
        score = tl.where(heavier & (weight > 0.0), x * scale + rough_gumbel(u), -float("inf"))
        places = tl.where(score > best, here, places)
        best = tl.where(score > best, score, best)
    winner, rank = _settle(values, ids_ptr, places, best > -float("inf"), scale, largest, hashes, key, offset, LISTED)
    return tl.sum(total, 0), tl.sum(above, 0), winner, rank


@triton.jit
def _narrow(
    values, ids_ptr, size, known, scale, largest, top_p, min_p, floor, token, pivot, hashes, key, offset,
    MASS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Race in the smallest set of top entries that reaches top_p of what rank and min_p keep.

    A winner with that much mass above it is outside the set, and so is everything not above it: the
    next race is among what is above.  This finds the winner of the set without sorting.

    Args:
        known: mass of all kept entries if `values` are only the top of them, else -1.
        token, pivot: a first winner and its rank, or token 0 and the lowest rank.
    """
    searching = size > 0
    while searching:
        total, above, winner, rank = _weigh(
            values, ids_ptr, size, scale, largest, min_p, floor, pivot, hashes, key, offset,
            MASS, LISTED, BLOCK, STAGES,
        )  # fmt: skip
        total = tl.where(known < 0, total, known)
        searching = (above > 0) & (above.to(tl.float64) >= total.to(tl.float64) * top_p) & (rank > pivot)
        token = tl.where(searching, winner, token)
        pivot = tl.where(searching, rank, pivot)
    return token


@triton.jit
def _middle(low, high):
    """The smallest integer above the mean of low < high, without overflow however far they are apart."""
    return (low >> 1) + (high >> 1) + (low & high & 1) + 1


@triton.jit
def _lower_bound(lane_maxima, k, BLOCK: tl.constexpr):
    """An `order_key` that the maxima of at least k lanes reach, and of not many more unless there are ties."""
    keys = order_key(lane_maxima)
    low, high = tl.min(keys, 0), tl.max(keys, 0)
    reach = tl.full((), BLOCK, tl.int32)
    while (reach > k + (k >> 3)) & (low < high):
        above = keys >= _middle(low, high)
        count = tl.sum(above.to(tl.int32), 0)
        enough = count >= k
        reach = tl.where(enough, count, reach)
        low, high = (
            tl.where(enough, tl.min(tl.where(above, keys, high), 0), low),
            tl.where(enough, high, tl.max(tl.where(above, low, keys), 0)),
        )
    return tl.where(k > BLOCK, order_key(tl.full((), -float("inf"), tl.float32)), low)


@triton.jit
def _list_above(
    row, vocab_size, bound, count_ptr, values, ids_ptr, scale, largest, min_p,
    WEIGHED: tl.constexpr, MASS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """List the unmasked entries whose key reaches `bound`, in any order.

    Returns:
        The number of such entries, listed or not; the mass of the whole row if WEIGHED, else 0.
    """
    lanes = tl.arange(0, BLOCK)
    least = (bound ^ ((bound >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        inside = start + lanes < vocab_size
        x = tl.load(row + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        if WEIGHED:
            total += (_weight(x, inside, scale, largest, min_p) * MASS).to(tl.int64)
        found = (x >= least) & (x > -float("inf"))
        slot = tl.atomic_add(count_ptr + tl.zeros((BLOCK,), tl.int32), 1, mask=found, sem="relaxed", scope="cta")
        listed = found & (slot < CAPACITY)
        tl.store(values + slot, x, mask=listed)
        tl.store(ids_ptr + slot, start + lanes, mask=listed)
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 0), tl.sum(total, 0)


@triton.jit
def _kth_rank(values, ids_ptr, size, k, low, high, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """A rank that exactly k entries reach, if more than k reach `low` and none is above `high`.

    Bisection whose ends move to ranks that occur, so that ties need no extra steps.
    """
    lanes = tl.arange(0, BLOCK)
    reach = size
    while (reach > k) & (low < high):  # NaN ranks above everything: the ends must not cross
        middle = _middle(low, high)
        counts = tl.zeros((BLOCK,), tl.int32)
        lowest_above = tl.full((BLOCK,), _HIGHEST_RANK, tl.int64)
        highest_below = tl.full((BLOCK,), _LOWEST_RANK, tl.int64)
        for start in tl.range(0, size, BLOCK):
            here = start + lanes
            x = tl.load(values + here, mask=here < size, other=-float("inf")).to(tl.float32)
            ids = here
            if LISTED:
                ids = tl.load(ids_ptr + here, mask=here < size, other=0)
            rank = _rank(x, ids)
            above = (here < size) & (rank >= middle)
            counts += above.to(tl.int32)
            below = (here < size) & (rank < middle)
            lowest_above = tl.where(above & (rank < lowest_above), rank, lowest_above)
            highest_below = tl.where(below & (rank > highest_below), rank, highest_below)
        count = tl.sum(counts, 0)
        enough = count >= k
        reach = tl.where(enough, count, reach)
        low = tl.where(enough, tl.min(lowest_above, 0), low)
        high = tl.where(enough, high, tl.max(highest_below, 0))
    return low


@triton.jit
def _choose_from_top_k(
    row, vocab_size, k, scale, top_p, min_p, hashes, key, offset, count_ptr, values, ids_ptr,
    MASS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    maxima, _places, top_or_nan = _lane_maxima(row, vocab_size, BLOCK, STAGES)
    bound = _lower_bound(maxima, k, BLOCK)
    top = tl.max(maxima, 0)
    largest = tl.maximum(top * scale, _LOWEST_FLOAT)
    found, _total = _list_above(
        row, vocab_size, bound, count_ptr, values, ids_ptr, scale, largest, min_p,
        False, MASS, CAPACITY, BLOCK, STAGES,
    )  # fmt: skip
    low = bound.to(tl.int64) << 32
    high = _rank(top, tl.full((), 0, tl.int32))
    nothing = tl.full((), _LOWEST_RANK, tl.int64)
    unknown = tl.full((), -1, tl.int64)
    token = tl.full((), 0, tl.int32)
    if found <= CAPACITY:
        floor = _kth_rank(values, ids_ptr, found, k, low, high, True, BLOCK)
        token = _narrow(
            values, ids_ptr, found, unknown, scale, largest, top_p, min_p, floor, token, nothing, hashes, key, offset,
            MASS, True, BLOCK, 1,
        )  # fmt: skip
    else:
        floor = low
        if found > k:
            floor = _kth_rank(row, ids_ptr, vocab_size, k, low, high, False, BLOCK)
        token = _narrow(
            row, ids_ptr, vocab_size, unknown, scale, largest, top_p, min_p, floor, token, nothing, hashes, key, offset,
            MASS, False, BLOCK, STAGES,
        )  # fmt: skip
    return token, top_or_nan


@triton.jit
def _choose_narrowed(
    row, vocab_size, scale, top_p, min_p, hashes, key, offset, count_ptr, values, ids_ptr,
    MASS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """top_p and min_p without top_k: from the listed top of the row if that contains the nucleus."""
    maxima, _places, top_or_nan = _lane_maxima(row, vocab_size, BLOCK, STAGES)
    bound = _lower_bound(maxima, BLOCK // 4, BLOCK)
    largest = tl.maximum(tl.max(maxima, 0) * scale, _LOWEST_FLOAT)
    # The lanes' maxima alone may show that the list would lack too much of the mass.
    weights = _weight(maxima, maxima > -float("inf"), scale, largest, min_p)
    at_best = tl.sum(tl.where(order_key(maxima) >= bound, weights, 0.0), 0)
    nothing = tl.full((), _LOWEST_RANK, tl.int64)
    token = tl.full((), -1, tl.int32)
    if at_best >= 0.999 * top_p.to(tl.float32) * tl.sum(weights, 0):
        found, total = _list_above(
            row, vocab_size, bound, count_ptr, values, ids_ptr, scale, largest, min_p,
            True, MASS, CAPACITY, BLOCK, STAGES,
        )  # fmt: skip
        if found <= CAPACITY:
            listed, _above, winner, rank = _weigh(
                values, ids_ptr, found, scale, largest, min_p, nothing, nothing, hashes, key, offset,
                MASS, True, BLOCK, 1,
            )  # fmt: skip
            if listed.to(tl.float64) >= total.to(tl.float64) * top_p:
                token = _narrow(
                    values, ids_ptr, found, total, scale, largest, top_p, min_p, nothing,
                    tl.where(listed > 0, winner, 0), rank, hashes, key, offset, MASS, True, BLOCK, 1,
                )  # fmt: skip
    if token < 0:
        winner, rank, _top = _race(row, vocab_size, scale, hashes, key, offset, BLOCK, STAGES)
        token = _narrow(
            row, ids_ptr, vocab_size, tl.full((), -1, tl.int64), scale, largest, top_p, min_p, nothing, winner, rank,
            hashes, key, offset, MASS, False, BLOCK, STAGES,
        )  # fmt: skip
    return token, top_or_nan


@triton.jit(do_not_specialize=["line"], do_not_specialize_on_alignment=["columns_ptr"])
def choose_kernel(
    logits_ptr, row_stride, columns_ptr, line, hashes, out_ptr, counts_ptr, list_values_ptr, list_ids_ptr, vocab_size,
    PADDING: tl.constexpr, GREEDY: tl.constexpr, RANDOM: tl.constexpr, NARROWED: tl.constexpr, MARKS: tl.constexpr,
    MASS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program i chooses for the row of column i of `SamplingMetadata.columns`; lines are `line` elements apart."""
    i = tl.program_id(0)
    column = columns_ptr + i
    kind = tl.load(column + 6 * line)
    if kind == PADDING:
        return
    index = tl.load(column)
    row = logits_ptr + index * row_stride
    keys = tl.load(column + line)
    key, offset = keys.to(tl.int32), (keys >> 32).to(tl.int32)
    k = tl.minimum(tl.load(column + 2 * line), vocab_size).to(tl.int32)
    scale = tl.load(column + 3 * line).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(column + 4 * line).to(tl.float64, bitcast=True)
    min_p = tl.load(column + 5 * line).to(tl.float64, bitcast=True).to(tl.float32)
    if kind == GREEDY:
        maxima, places, top = _lane_maxima(row, vocab_size, BLOCK, STAGES)
        token = _first_best(maxima, places, places < vocab_size)
    elif kind == RANDOM:
        token, _rank_of_it, top = _race(row, vocab_size, scale, hashes, key, offset, BLOCK, STAGES)
    else:
        count, start = counts_ptr + i, i.to(tl.int64) * CAPACITY
        tl.store(count, 0)
        tl.debug_barrier()  # before any thread lists a token
        if kind == NARROWED:
            token, top = _choose_narrowed(
                row, vocab_size, scale, top_p, min_p, hashes, key, offset,
                count, list_values_ptr + start, list_ids_ptr + start, MASS, CAPACITY, BLOCK, STAGES,
            )  # fmt: skip
        else:
            token, top = _choose_from_top_k(
                row, vocab_size, k, scale, top_p, min_p, hashes, key, offset,
                count, list_values_ptr + start, list_ids_ptr + start, MASS, CAPACITY, BLOCK, STAGES,
            )  # fmt: skip
    token = tl.minimum(token, vocab_size - 1)
    if MARKS:
        token = tl.where((top > -float("inf")) & (top < float("inf")), token, NO_TOKEN)
    tl.store(out_ptr + index, token.to(tl.int64))


def choose(logits: Tensor, columns: Tensor, out: Tensor | None = None, marks: bool = True) -> Tensor:
    """int64[R]: one token per row of `logits[R, V]`, on the same device.

    Nothing here depends on what `columns` contains, so a captured launch serves any parameters.

    Args:
        columns: int64[COLUMN_LINES, C], see `SamplingMetadata.columns`; may be a view of a larger buffer.
        out: int64[R] to write to, else a new tensor; rows that no column names keep their contents.
        marks: give `unusable.NO_TOKEN` to rows whose largest logit is not finite; False if masks may have made it so.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_columns, device = columns.shape[1], logits.device
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    choose_kernel[(num_columns,)](
        logits,
        logits.stride(0) if num_rows > 1 else vocab_size,
        columns,
        columns.stride(0),
        token_hashes(vocab_size, device),
        out,
        torch.empty(num_columns, dtype=torch.int32, device=device),
        torch.empty((num_columns, CAPACITY), dtype=torch.float32, device=device),
        torch.empty((num_columns, CAPACITY), dtype=torch.int32, device=device),
        vocab_size,
        PADDING=int(Kind.PADDING),
        GREEDY=int(Kind.GREEDY),
        RANDOM=int(Kind.RANDOM),
        NARROWED=int(Kind.NARROWED),
        MARKS=marks,
        # A whole row of ones still fits an int64.
        MASS=2.0 ** (62 - vocab_size.bit_length()),
        CAPACITY=CAPACITY,
        BLOCK=BLOCK,
        STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return out
