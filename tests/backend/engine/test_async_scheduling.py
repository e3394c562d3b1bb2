"""With `async_scheduling` step n + 1 is scheduled while step n runs; the output does not change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_rig import Info, PagedHashRunner, add, collect, expected_output, make_core, run_until_idle

from inflight.runner.pipeline import ThreadedRunner


class GatedRunner(PagedHashRunner):
    """While `gated`, a step does not end until the next one has been prepared."""

    def __init__(self, info: Info, block_size: int, max_num_seqs: int) -> None:
        super().__init__(info, block_size, max_num_seqs)
        self.gated = True
        self.num_prepared = 0
        self.num_executed = 0
        self.overlapped = 0
        self._changed = threading.Condition()

    def prepare(self, out):
        with self._changed:
            self.num_prepared += 1
            self._changed.notify_all()

    def execute(self, out, prepared):
        self.num_executed += 1
        with self._changed:
            waits_for = self.num_executed + 1
            self.overlapped += self._changed.wait_for(
                lambda: self.num_prepared >= waits_for, timeout=60 if self.gated else 0
            )
        return super().execute(out, prepared)


def gated_core(**options):
    core = make_core(Info(), async_scheduling=True, **options)
    runner = GatedRunner(core.info, core.config.block_size, core.config.max_num_seqs)
    core.runner = ThreadedRunner(runner, ThreadPoolExecutor(1))
    return core


def test_a_step_is_prepared_while_the_previous_one_runs():
    core = gated_core()
    params = add(core, 1, [1, 2, 3], max_tokens=6, ignore_eos=True)
    outputs, reasons = {}, {}
    for _ in range(4):
        collect(core, outputs, reasons)
    core.runner.runner.gated = False
    run_until_idle(core, outputs, reasons)
    assert core.runner.runner.overlapped >= 4
    assert outputs[1, 0] == expected_output([1, 2, 3], params, core.info)[0]


def test_a_request_that_ends_by_length_wastes_no_row():
    core = make_core(Info(), async_scheduling=True)
    add(core, 1, [1, 2, 3], max_tokens=5, ignore_eos=True)
    run_until_idle(core, {}, {})
    assert core.runner.batch_sizes == [1] * 5


@pytest.mark.parametrize("caching", [True, False])
def test_a_stop_token_wastes_one_row_whose_token_is_dropped(caching):
    info = Info()
    core = make_core(info, async_scheduling=True, block_size=2, enable_prefix_caching=caching)
    free = add(core, 1, [3, 1, 4], max_tokens=12, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    expected = expected_output([3, 1, 4], free, info)[0]
    del core.runner.batch_sizes[:]
    stop = next(token for index, token in enumerate(expected) if index >= 2 and token not in expected[:index])
    add(core, 2, [3, 1, 4], max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
    run_until_idle(core, outputs, reasons)
    assert outputs[2, 0] == expected[: expected.index(stop) + 1]
    assert reasons[2, 0] == "stop"
    assert sum(core.runner.batch_sizes) == len(outputs[2, 0]) + 1


def test_a_request_aborted_in_flight_yields_no_more_tokens():
    core = make_core(Info(), async_scheduling=True)
    add(core, 1, [1, 2], max_tokens=20, ignore_eos=True)
    kept = add(core, 2, [5, 6], max_tokens=20, ignore_eos=True)
    outputs, reasons = {}, {}
    collect(core, outputs, reasons)
    core.abort(1)
    run_until_idle(core, outputs, reasons)
    assert len(outputs[1, 0]) == 1
    assert outputs[2, 0] == expected_output([5, 6], kept, core.info)[0]
    assert set(reasons) == {(2, 0)}


def test_a_token_in_flight_survives_preemption(monkeypatch):
    """It was sampled from intact blocks, so it is not sampled again."""
    core = make_core(Info(num_blocks=16), async_scheduling=True, block_size=4, enable_prefix_caching=False)
    params = {i: add(core, i, [i + 1] * 20, max_tokens=40, ignore_eos=True) for i in range(2)}
    sampled, execute = [], core.runner.execute

    def counting(out, prepared):
        step = execute(out, prepared)
        sampled.extend(token for token in step.token_ids if token >= 0)
        return step

    monkeypatch.setattr(core.runner, "execute", counting)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert core.scheduler.num_preempted_total >= 1
    for i in range(2):
        assert outputs[i, 0] == expected_output([i + 1] * 20, params[i], core.info)[0]
    assert len(sampled) == len(outputs[0, 0]) + len(outputs[1, 0])
