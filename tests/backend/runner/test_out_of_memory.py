"""A step that runs out of memory fails its requests; the runner's next step is right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from offline import make_core, make_device_core

from inflight.device import memory
from inflight.device.memory import out_of_memory
from inflight.engine.core import EngineCore
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("memory"))


def fail_steps(core: EngineCore, monkeypatch: pytest.MonkeyPatch, errors: dict[int, BaseException]) -> None:
    """Let the model raise `errors[n]` in its n-th call, after it has run."""
    runner: Any = getattr(core.runner, "runner", core.runner)
    forward, calls = runner.forward.run, iter(range(10**6))

    def failing(*args: Any) -> Any:
        result = forward(*args)
        if (error := errors.get(next(calls))) is not None:
            raise error
        return result

    monkeypatch.setattr(runner.forward, "run", failing)


def serve(
    core: EngineCore, prompts: dict[int, list[int]], **params: Any
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Output tokens and failures of all requests."""
    outputs: dict[int, list[int]] = {request_id: [] for request_id in prompts}
    failed: dict[int, str] = {}
    for request_id, prompt in prompts.items():
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
        assert core.add_request(AddRequest(request_id, prompt, sampling)) is None
    while core.has_work:
        message = core.step()
        check_core(core)
        for delta in message.deltas:
            outputs[delta.request_id] += delta.token_ids
        failed.update((failure.request_id, failure.message) for failure in message.failed)
    return outputs, failed


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("make", [make_core, make_device_core])
def test_the_engine_goes_on_after_an_out_of_memory(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, overlap: bool, native: bool, make: Any
) -> None:
    """Penalties and prompt logprobs leave no trace of the failed request in its slot either."""
    core = make(checkpoint, async_scheduling=overlap, native_forward=native, max_num_seqs=2, block_size=4)
    fail_steps(core, monkeypatch, {3: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")})
    prompts = {number: [number + 3] * 9 for number in range(4)}
    outputs, failed = serve(core, prompts, repetition_penalty=1.0001, prompt_logprobs=1)
    assert failed == dict.fromkeys(
        (0, 1), "the step ran out of memory; lower max_num_batched_tokens or kv_cache_memory"
    )
    expected = greedy_reference(checkpoint, list(prompts.values()), [8] * 4)
    assert [outputs[2], outputs[3]] == expected[2:]
    assert [outputs[0], outputs[1]] == [tokens[:3] for tokens in expected[:2]]
    again, failed = serve(core, prompts)
    assert not failed
    assert list(again.values()) == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("make", "owner", "name"), [(make_core, "state", "step_inputs"), (make_device_core, "rows", "write")]
)
def test_a_step_that_runs_out_of_memory_while_it_is_prepared_fails_alone(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, overlap: bool, make: Any, owner: str, name: str
) -> None:
    """With launch-ahead that is in the thread of the engine.  The step's blocks and slots are not lost."""
    core = make(checkpoint, async_scheduling=overlap, max_num_seqs=2, block_size=4)
    runner: Any = getattr(core.runner, "runner", core.runner)
    prepare, calls = getattr(getattr(runner, owner), name), iter(range(10**6))

    def failing(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("CUDA error: out of memory")
        return prepare(*args)

    monkeypatch.setattr(getattr(runner, owner), name, failing)
    prompts = {number: [number + 3] * 9 for number in range(4)}
    outputs, failed = serve(core, prompts)
    assert set(failed) == {0, 1}
    expected = greedy_reference(checkpoint, list(prompts.values()), [8] * 4)
    assert [outputs[0], outputs[1]] == [tokens[:3] for tokens in expected[:2]]
    assert [outputs[2], outputs[3]] == expected[2:]


@pytest.mark.parametrize("failing_step", range(1, 8))
def test_the_step_behind_a_failed_one_writes_to_its_own_blocks(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    """The device's block table lacks what the failed step was to bring; the slot's last owner's blocks are cached."""
    core = make_device_core(checkpoint, max_num_seqs=1, block_size=2, num_gpu_blocks_override=128)
    cached = [7 * token % 199 for token in range(40)]
    before, _ = serve(core, {1: cached})
    runner: Any = core.runner
    write, calls = runner.rows.write, iter(range(10**6))

    def failing(*args: Any) -> Any:
        if next(calls) == failing_step:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return write(*args)

    monkeypatch.setattr(runner.rows, "write", failing)
    _, failed = serve(core, {2: [11, 12, 13]}, max_tokens=12)
    assert list(failed) == [2]
    hits = core.pool.num_prefix_hits
    again, _ = serve(core, {3: cached})
    assert core.pool.num_prefix_hits >= hits + 38
    assert again[3] == before[1]


def test_the_model_is_whole_again_after_its_head_ran_out_of_memory(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt logprobs call it with a fake in place of its decoder; the head raises in the second chunk."""
    core = make_core(checkpoint, native_forward=False)
    core.runner.forward.max_rows = 4
    head, calls = core.runner.model.lm_head, iter(range(10**6))
    forward = head.forward

    def failing(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(x)

    monkeypatch.setattr(head, "forward", failing)
    _, failed = serve(core, {1: [7] * 12}, prompt_logprobs=0)
    assert list(failed) == [1]
    outputs, failed = serve(core, {2: [9] * 12}, prompt_logprobs=0)
    assert not failed
    assert [outputs[2]] == greedy_reference(checkpoint, [[9] * 12], [8])


def test_the_cache_is_emptied_when_nothing_of_the_step_is_left(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's traceback would keep the step's tensors alive."""
    from weakref import ref

    core = make_core(checkpoint, native_forward=False)
    tensors, alive = [], []

    def out_of_memory_with_tensors(*_: Any) -> Any:
        large = torch.zeros(1000)
        tensors.append(ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(core.runner.forward, "run", out_of_memory_with_tensors)
    monkeypatch.setattr(
        "inflight.device.memory.free_cached_memory", lambda device: alive.extend(tensor() for tensor in tensors)
    )
    _, failed = serve(core, {1: [1, 2, 3]})
    assert list(failed) == [1]
    assert alive == [None]


def test_other_errors_still_end_the_engine(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(checkpoint)
    fail_steps(core, monkeypatch, {0: RuntimeError("CUDA error: an illegal memory access was encountered")})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        serve(core, {1: [1, 2, 3]})


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("Allocation on device"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("no memory of it"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_one: bool) -> None:
    assert (out_of_memory(error, CPU) is not None) == is_one


def test_on_a_gpu_the_message_names_its_options_and_the_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    memory.free_cached_memory(CPU)
    assert not calls
    memory.free_cached_memory(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    assert calls == ["empty_cache"]
    message = out_of_memory(MemoryError(), torch.device("cuda"))
    assert message == "the step ran out of GPU memory; lower max_num_batched_tokens or gpu_memory_utilization"
