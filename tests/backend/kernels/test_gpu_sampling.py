"""The GPU sampling kernels against the sampler on a CPU; without a GPU they run in an interpreter."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
import triton.language as tl
from nightly import nightly_but
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_bad_words, gpu_penalties, gpu_sampler
from inflight.kernels.gpu.gpu_math import exp_of_negative, negative_exponential, order_key, rough_gumbel, uniform
from inflight.kernels.gpu.gpu_sampling import GpuSampling
from inflight.sampling import Sampler, SamplingMetadata, SamplingTable, sampler
from inflight.sampling.compile_ops import compile_ops
from inflight.sampling.metadata import COLUMN_LINES
from inflight.sampling.noise import MULTIPLIER, TO_UNIT, mix_seed, row_keys, token_hashes
from inflight.sampling.ops import SamplingOps
from inflight.sampling.reference_sampling import ReferenceSampling
from inflight.sampling.rules import DEVICE_RULES
from inflight.sampling.unusable import NO_TOKEN

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on infinities in the interpreter

NAN = float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=70, top_p=0.5),
    SamplingParams(top_k=1),
    SamplingParams(temperature=2.0, top_p=0.3, min_p=0.01),
]


SPOILERS = [(0, NAN), (130, -NAN), (202, NAN), (70, float("inf")), (slice(None), -float("inf")), (slice(None), -NAN)]


@pytest.fixture(
    params=[
        pytest.param((128, 128), id="one block", marks=pytest.mark.nightly),
        pytest.param((32, 8), id="many blocks, full list"),
    ]
)
def blocks(request, monkeypatch):
    """Sizes with which small vocabularies take every path through the kernel."""
    monkeypatch.setattr(gpu_sampler, "BLOCK", request.param[0])
    monkeypatch.setattr(gpu_sampler, "CAPACITY", request.param[1])


def metadata_of(params: list[SamplingParams], vocab_size: int, seed: int) -> SamplingMetadata:
    rows = new_table(len(params), vocab_size)
    for slot, row_params in enumerate(params):
        rows.set_row(slot, row_params, seed + slot, [], 1)
    return rows.select(np.arange(len(params)), np.arange(len(params)) * 3 + 1)


def by_the_cpu(logits: torch.Tensor, params: list[SamplingParams], seed: int = 0) -> list[int]:
    return Sampler()(logits, metadata_of(params, logits.shape[-1], seed)).token_ids.tolist()


def both(logits: torch.Tensor, params: list[SamplingParams], seed: int = 0) -> tuple[list[int], list[int]]:
    """Tokens by the kernel and by the CPU's sampler; row i has params[i] and seed + i."""
    metadata = metadata_of(params, logits.shape[-1], seed)
    expected = Sampler()(logits, metadata).token_ids.tolist()
    if metadata.columns is None:
        return expected, expected
    return gpu_sampler.choose(logits.to(DEVICE), metadata.columns.to(DEVICE)).tolist(), expected


def random_logits(rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.usefixtures("blocks")
def test_tokens_equal_those_of_the_cpu():
    """Each kind, with a flat and with a peaked distribution."""
    dtype = torch.bfloat16 if gpu_sampler.BLOCK == 128 else torch.float32
    logits = torch.cat([random_logits(len(KINDS), 203, scale) for scale in (0.2, 3.0)])
    got, expected = both(logits.to(dtype), KINDS * 2)
    assert got == expected
    assert len(set(got)) > 5


def test_a_real_vocabulary_with_the_block_size_of_a_gpu():
    """Rows of 50257 elements are not aligned; they take several blocks and have a long tail."""
    got, expected = both(random_logits(len(KINDS), 50257, 2.5).half(), KINDS, seed=7)
    assert got == expected


# With few different values there are ties within the kept set, across its edge, and in masses.
_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 20]),
    top_p=st.sampled_from([1.0, 0.05, 0.5, 0.77, 0.93, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.04, 0.3, 1.0]),
)
_value = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 3.0, float("-inf")])


@pytest.mark.usefixtures("blocks")
@given(data=st.data(), values=st.lists(_value, min_size=1, max_size=45), seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_is_what_the_cpu_keeps(data, values, seed):
    """Three draws per row: one token too many or too few in the kept set would change some of them."""
    assume(max(values) > -np.inf)  # else the sampler, not the kernel, says that there is no token
    params = [drawn for drawn in data.draw(st.lists(_params, min_size=1, max_size=3)) for _ in range(3)]
    logits = torch.tensor(values).expand(len(params), -1).contiguous()
    got, expected = both(logits, params, seed)
    assert got == expected


BOUNDARIES = [
    (SamplingParams(top_p=0.5), {0}),
    (SamplingParams(top_p=0.76), {0, 1, 2}),
    (SamplingParams(top_k=3, top_p=0.57), {0}),
    (SamplingParams(min_p=0.5), {0, 1}),
    (SamplingParams(top_k=2), {0, 1}),
]


def test_boundaries(monkeypatch):
    """A probability equal to a bound, and the second of two tied tokens."""
    monkeypatch.setattr(gpu_sampler, "BLOCK", 4)
    params = [params for params, _ in BOUNDARIES for _ in range(10)]
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(len(params), -1).contiguous()
    got, _ = both(logits, params)
    for number, (narrowed, allowed) in enumerate(BOUNDARIES):
        assert set(got[10 * number : 10 * number + 10]) == allowed, narrowed


def test_extreme_logits_give_a_token_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "BLOCK", 16)
    values = torch.tensor([-3e38, 3e38])
    got, _ = both(values.repeat_interleave(5)[:, None].expand(-1, 37).contiguous(), KINDS[:5] * len(values))
    assert all(0 <= token < 37 for token in got)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("turn", nightly_but([0], range(len(SPOILERS))))
def test_a_row_that_is_not_finite_gets_no_token_and_the_others_theirs(turn):
    """Every kind of row; in all turns, each spoiled in every way."""
    logits = random_logits(2 * len(KINDS), 203, 2.0)
    usable = by_the_cpu(logits, KINDS * 2)
    for row in range(len(KINDS)):
        where, value = SPOILERS[(row + turn) % len(SPOILERS)]
        logits[row, where] = value
    got, expected = both(logits, KINDS * 2)
    assert got == expected == [NO_TOKEN] * len(KINDS) + usable[len(KINDS) :]


@pytest.mark.usefixtures("blocks")
def test_what_masks_have_made_of_a_row_is_no_reason():
    """With edits the model's own logits decide, and not what the kernel sees."""
    params = [msgspec.structs.replace(kind, min_tokens=3, stop_token_ids=[5]) for kind in KINDS] * 3
    logits = torch.full((len(params), 203), -float("inf"))
    logits[:, 5] = 1.0  # masked: nothing is left
    logits[len(KINDS) : 2 * len(KINDS)] = random_logits(len(KINDS), 203, 2.0)
    logits[2 * len(KINDS) :] = random_logits(len(KINDS), 203, 2.0)
    logits[2 * len(KINDS) :, 5] = NAN  # masked, and not to be hidden
    rows = SamplingTable(len(params), 203, DEVICE, ops=GpuSampling())
    for slot, row_params in enumerate(params):
        rows.set_row(slot, row_params, slot, [], 1)
    metadata = rows.select(np.arange(len(params)), np.ones(len(params), dtype=np.int64))
    got = Sampler()(logits.to(DEVICE), metadata).token_ids.tolist()
    masked, usable, spoiled = (got[k * len(KINDS) : (k + 1) * len(KINDS)] for k in range(3))
    assert masked == [0] * len(KINDS)
    assert min(usable) >= 0
    assert spoiled == [NO_TOKEN] * len(KINDS)


def test_search_ends_with_nan_among_ties(monkeypatch):
    """There are more ties than the list holds and more NaN than top_k."""
    monkeypatch.setattr(gpu_sampler, "BLOCK", 16)
    monkeypatch.setattr(gpu_sampler, "CAPACITY", 4)
    logits = torch.zeros(1, 60)
    logits[0, ::3] = float("nan")
    got, _ = both(logits, [SamplingParams(top_k=5)])
    assert got == [NO_TOKEN]


@pytest.mark.usefixtures("blocks")
def test_a_mask_that_leaves_few_tokens():
    logits = torch.full((len(KINDS), 301), -float("inf"))
    logits[:, [3, 200, 300]] = torch.tensor([0.0, 0.5, 0.2])
    got, expected = both(logits, KINDS)
    assert got == expected


def test_a_row_does_not_depend_on_those_beside_it():
    logits = random_logits(len(KINDS), 300, 2.0)
    rows = new_table(len(KINDS), 300)
    for slot, params in enumerate(KINDS):
        rows.set_row(slot, params, slot, [], 1)

    def tokens(slots: list[int]) -> list[int]:
        metadata = rows.select(np.array(slots), np.full(len(slots), 9))
        if metadata.columns is None:
            return logits[slots].argmax(-1).tolist()
        return gpu_sampler.choose(logits[slots].to(DEVICE), metadata.columns.to(DEVICE)).tolist()

    whole = tokens(list(range(len(KINDS))))
    assert [tokens([slot])[0] for slot in range(len(KINDS))] == whole
    assert tokens([6, 1, 3]) == [whole[6], whole[1], whole[3]]


@pytest.mark.usefixtures("blocks")
def test_what_the_scratch_contains_does_not_matter(monkeypatch):
    """A captured launch finds there what other graphs left."""
    logits = random_logits(len(KINDS), 203, 2.0)
    expected = by_the_cpu(logits, KINDS)
    empty = torch.empty
    monkeypatch.setattr(gpu_sampler.torch, "empty", lambda *size, **options: empty(*size, **options).fill_(77))
    assert both(logits, KINDS)[0] == expected


def test_columns_in_any_order_with_padding_behind_them():
    """The input of a captured launch: a column for each row of its bucket, in a view of a larger buffer."""
    logits = random_logits(len(KINDS) + 3, 203, 2.0)
    rows = new_table(len(KINDS), 203)
    for slot, params in enumerate(KINDS):
        rows.set_row(slot, params, slot, [], 1)
    slots, positions = np.arange(len(KINDS)), np.arange(len(KINDS)) + 5
    expected = Sampler()(logits[: len(KINDS)], rows.select(slots, positions)).token_ids
    buffer = np.full((COLUMN_LINES, len(logits) + 2), 99, dtype=np.int64)
    rows.fill_columns(buffer[:, : len(logits)], slots, positions)
    assert (buffer[:, len(logits) :] == 99).all()
    columns = torch.from_numpy(buffer).to(DEVICE)[:, : len(logits)]
    out = torch.full((len(logits),), -7, device=DEVICE)
    assert gpu_sampler.choose(logits.to(DEVICE), columns, out) is out
    assert out[: len(KINDS)].tolist() == expected.tolist()
    assert out[len(KINDS) :].tolist() == [-7] * 3, "padding writes nothing"
    again = columns[:, torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))]
    assert torch.equal(gpu_sampler.choose(logits.to(DEVICE), again, torch.full_like(out, -7)), out)


def test_rows_that_are_all_greedy_take_the_first_largest_logit():
    rows = new_table(3, 64)
    for slot in range(3):
        rows.set_row(slot, SamplingParams(temperature=0.0, top_k=3), 0, [], 1)
    columns = np.empty((COLUMN_LINES, 3), dtype=np.int64)
    rows.fill_columns(columns, np.arange(3), np.ones(3, dtype=np.int64))
    logits = random_logits(3, 64, 1.0)
    logits[1, [5, 40]] = 9.0
    got = gpu_sampler.choose(logits.to(DEVICE), torch.from_numpy(columns).to(DEVICE)).tolist()
    assert got == logits.argmax(-1).tolist()
    assert got[1] == 5


def test_a_slot_reused_without_top_k_forgets_it():
    rows = new_table(1, 64)
    rows.set_row(0, SamplingParams(top_k=1), 0, [], 1)
    rows.set_row(0, SamplingParams(), 0, [], 1)
    metadata = rows.select(np.zeros(12, dtype=np.int64), np.arange(12))
    assert metadata.columns is not None
    chosen = gpu_sampler.choose(torch.zeros(12, 64, device=DEVICE), metadata.columns.to(DEVICE))
    assert len(set(chosen.tolist())) > 4


def test_the_sampler_uses_the_kernel_if_there_is_one(monkeypatch):
    """Edits come first, as on a CPU; no groups are made."""
    params = [
        SamplingParams(top_k=8, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25),
        SamplingParams(temperature=0.0, logit_bias={5: 30.0}),
        SamplingParams(bad_words_ids=[[2]], top_p=0.9),
        SamplingParams(frequency_penalty=2.0),
    ]
    logits = random_logits(4, 97, 2.0)
    history = np.tile(np.arange(12, dtype=np.int32) % 5, (4, 1))

    def run(ops: SamplingOps) -> tuple[list[int], int]:
        rows = SamplingTable(4, 97, DEVICE, ops=ops)
        for slot, row_params in enumerate(params):
            rows.set_row(slot, row_params, slot, [], 6)
        metadata = rows.select(np.arange(4), np.full(4, 12), history)
        return Sampler()(logits.to(DEVICE), metadata).token_ids.tolist(), len(metadata.random_groups)

    without, groups = run(ReferenceSampling())
    assert run(GpuSampling()) == (without, 0)
    assert groups > 0


def test_penalties_equal_those_of_the_cpu_bit_for_bit():
    params = SamplingParams(repetition_penalty=1.17, frequency_penalty=0.33, presence_penalty=-0.71)
    rows = new_table(3, 50)
    for slot in range(3):
        rows.set_row(slot, params, slot, [], 4)
    metadata = rows.select(np.arange(3), np.full(3, 40), np.tile(np.arange(40) % 9, (3, 1)))
    logits = random_logits(3, 50, 4.0)
    expected = sampler.edit_logits(logits, metadata)
    assert not torch.equal(logits, expected)
    again = logits.clone()
    (penalised,) = metadata.edits
    gpu_penalties.penalise(again, penalised)
    assert torch.equal(again, expected)


def test_warm_up_runs_the_kernels_that_requests_run(monkeypatch):
    dtypes = []
    real = gpu_sampler.choose
    monkeypatch.setattr(
        gpu_sampler, "choose", lambda x, *args, **more: dtypes.append(x.dtype) or real(x, *args, **more)
    )
    penalised = []
    monkeypatch.setattr(gpu_penalties, "penalise", lambda x, p: penalised.append(x.dtype))
    compile_ops(40, torch.bfloat16, DEVICE, GpuSampling())
    assert dtypes == [torch.float32, torch.bfloat16]
    assert penalised == [torch.float32]


def test_warm_up_runs_those_of_a_history_on_the_device(monkeypatch):
    calls = []
    monkeypatch.setattr(
        gpu_sampler, "choose", lambda x, m, marks=True: torch.zeros(len(x), dtype=torch.int64, device=DEVICE)
    )
    monkeypatch.setattr(gpu_bad_words, "ban", lambda x, m: calls.append("ban"))
    monkeypatch.setattr(gpu_penalties, "count_and_penalise", lambda x, m: calls.append("penalise"))
    compile_ops(40, torch.bfloat16, DEVICE, GpuSampling(), DEVICE_RULES)
    assert calls == ["ban", "penalise"]


@triton.jit
def _map_kernel(x_ptr, out_ptr, n, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n, other=0.5)
    if WHICH == 0:
        y = negative_exponential(x)
    elif WHICH == 1:
        y = exp_of_negative(x)
    elif WHICH == 2:
        y = rough_gumbel(x)
    else:
        y = order_key(x)
    tl.store(out_ptr + places, y, mask=places < n)


def mapped(which: int, x: torch.Tensor) -> np.ndarray:
    out = torch.empty(len(x), dtype=torch.int32 if which == 3 else torch.float32, device=DEVICE)
    grid = (triton.cdiv(len(x), 2**14),)
    _map_kernel[grid](x.to(DEVICE), out, len(x), WHICH=which, BLOCK=2**14, enable_fp_fusion=False)
    return out.cpu().numpy()


def units(got: np.ndarray, exact: np.ndarray) -> float:
    """Largest error, in units in the last place."""
    return float((np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_functions_are_as_accurate_as_a_library():
    hashes = np.random.default_rng(0).integers(1, 2**31, 2**16)
    hashes = np.concatenate([hashes, hashes >> 10, hashes >> 20, 2**31 - 1 - (hashes >> 20), [1]]) | 1
    u = torch.from_numpy(hashes).float() * TO_UNIT
    wide = u.double().numpy()
    assert units(mapped(0, u), np.log1p(-wide)) < 1.1
    assert np.abs(mapped(2, u) + np.log(-np.log1p(-wide))).max() < 2e-4
    x = -torch.cat([u * 87, u, u * 1e-3, torch.zeros(1)])
    assert units(mapped(1, x), np.exp(x.double().numpy())) < 1.1
    assert mapped(1, torch.tensor([-88.0, -1e30, -float("inf")])).tolist() == [0.0, 0.0, 0.0]


def test_keys_order_like_floats():
    x = torch.tensor([-float("inf"), -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0000002, float("inf")])
    keys = mapped(3, x).tolist()
    assert keys == sorted(keys)
    assert [a == b for a, b in pairwise(keys)] == [a == b for a, b in pairwise(x.tolist())]


@triton.jit
def _uniform_kernel(hashes_ptr, out_ptr, key, offset, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    u = uniform(tl.load(hashes_ptr + places, mask=places < n, other=0), key.to(tl.int32), offset.to(tl.int32))
    tl.store(out_ptr + places, u, mask=places < n)


def test_noise_equals_that_of_the_cpu_bit_for_bit():
    """Up to the logarithm: integer operations and one multiplication."""
    hashes = token_hashes(5000, torch.device("cpu"))
    for seed in (0, 12345):
        key, offset = row_keys(np.array([mix_seed(seed)], dtype=np.uint64), np.array([17]))[:, 0].tolist()
        out = torch.empty(5000, dtype=torch.float32, device=DEVICE)
        _uniform_kernel[(1,)](hashes.to(DEVICE), out, key, offset, 5000, BLOCK=8192, enable_fp_fusion=False)
        x = hashes * key + offset
        x ^= x >> 15
        x *= MULTIPLIER
        x ^= x >> 16
        assert torch.equal(out.cpu(), (x | 1).float() * TO_UNIT)
