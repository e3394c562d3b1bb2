"""The device runs steps whenever it likes; no buffer is rewritten before its reader has ended."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_queue import LazyQueue
from offline import make_core, make_device_core, run, tokens

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner import device_runner
from inflight.runner.device_runner import DeviceRunner

from .test_drafts import Replayer
from .test_generation import mixed_params, random_prompts

COUNT = 14
PROMPTS = random_prompts(COUNT, seed=11)
# Not those with bad words: they make a launch wait.
PARAMS = [mixed_params(index) for index in range(COUNT + 2) if index % 8 != 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("queue"))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[tuple[int, int], list[int]]:
    return outputs(make_core(checkpoint))


def outputs(core: Any, stagger: int = 0) -> dict[tuple[int, int], list[int]]:
    deltas = run(core, PROMPTS, PARAMS, stagger)
    return {key: tokens(of_sequence) for key, of_sequence in deltas.items()}


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    eagerness=st.sampled_from([0.0, 0.3, 0.8]),
    pool=st.sampled_from([None, 66]),
    drafts=st.booleans(),
    stagger=st.integers(0, 2),
)
def test_tokens_do_not_depend_on_when_the_device_runs(checkpoint, expected, seed, eagerness, pool, drafts, stagger):
    queue = LazyQueue(random.Random(seed), eagerness)
    core = make_device_core(
        checkpoint, queue, block_size=4, max_num_batched_tokens=64, num_gpu_blocks_override=pool, max_num_seqs=6
    )
    if drafts:
        core.scheduler.policies.drafter = Replayer(expected, wrong=3)
    assert outputs(core, stagger) == expected
    assert queue.most_waiting >= 2 or eagerness


def test_a_launch_waits_for_nothing_unless_the_ring_is_full(checkpoint, expected):
    """Nothing of the device has run by then but what somebody waited for."""
    queue = LazyQueue(random.Random(0), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    launch, waits = core.runner.launch, []

    def counting(out: Any) -> Any:
        before = queue.num_waits
        ticket = launch(out)
        waits.append(queue.num_waits - before)
        return ticket

    core.runner.launch = counting
    assert outputs(core) == expected
    assert set(waits) == {0}
    assert core.runner.num_collected_first == 0


def test_more_steps_in_flight_than_the_ring_has_places_are_read_ahead(checkpoint, expected):
    queue = LazyQueue(random.Random(1), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    core._max_launched = 4
    assert outputs(core) == expected
    assert queue.most_waiting <= 2


def test_the_fake_device_notices_a_buffer_that_is_rewritten_too_early(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(device_runner, "_RING", 1)
    monkeypatch.setattr(DeviceRunner, "_next_buffers", lambda self: self._ring[0])
    core = make_device_core(checkpoint, LazyQueue(random.Random(2), eagerness=0.0))
    with contextlib.suppress(IndexError, RuntimeError):  # where an index was overwritten
        assert outputs(core) != expected


def test_collecting_waits_for_that_step_only(checkpoint):
    queue = LazyQueue(random.Random(3), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert core.add_request(AddRequest(0, [1, 2, 3], params)) is None
    while core.has_work:
        core.step()
        assert len(queue._work) == len(core._launched), "the step behind has not run"


def test_a_rule_that_reads_tokens_waits_for_the_step_before(checkpoint):
    words = SamplingParams(temperature=1.0, seed=3, bad_words_ids=[[i, i + 1] for i in range(150)], max_tokens=12)
    plain = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    prompts, params = random_prompts(2, seed=5), [words, plain]
    expected = run(make_core(checkpoint), prompts, params)
    core = make_device_core(checkpoint, LazyQueue(random.Random(4), eagerness=0.0))
    got = run(core, prompts, params)
    assert {key: tokens(deltas) for key, deltas in got.items()} == {k: tokens(d) for k, d in expected.items()}
    assert 10 <= core.runner.num_collected_first <= 12
    assert core.step().stats.collected_first_total == core.runner.num_collected_first
