"""A step's batch is prepared once and reaches every attention call of the forward pass, and no other."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from offline import make_core, run
from paged_case import PagedCase

from inflight.attention.base import AttentionMetadata, LayerSpec, current_batch, forward_context
from inflight.attention.reference import ReferenceAttention
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_attention import CpuAttention

SPEC = LayerSpec(4, 2, 16, 16, 0.25)


def test_outside_of_a_context_there_is_no_batch() -> None:
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        current_batch()
    metadata = PagedCase(SPEC, [5], [5], 16).metadata([5])
    with forward_context(metadata, ReferenceAttention()):
        assert current_batch() is metadata
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        current_batch()


def test_a_failed_forward_pass_leaves_no_batch_behind() -> None:
    metadata = PagedCase(SPEC, [5], [5], 16).metadata([5])
    with pytest.raises(ZeroDivisionError), forward_context(metadata, ReferenceAttention()):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        current_batch()


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
def test_batches_prepared_ahead_do_not_affect_each_other() -> None:
    """A kernel keeps no step in itself: the batch passed to it decides."""
    backend, first, second = CpuAttention(), PagedCase(SPEC, [40, 9], [1, 9], 16), PagedCase(SPEC, [23], [5], 16)
    expected = [case.run(ReferenceAttention()) for case in (first, second)]
    caches = [case.filled_cache(backend) for case in (first, second)]
    batches = [case.prepared(backend) for case in (first, second)]
    for case, cache, batch, right in zip((first, second), caches, batches, expected):
        torch.testing.assert_close(backend.attend(case.query, cache, batch, SPEC, None), right)


@pytest.mark.parametrize("options", [{}, dict(native_forward=False), dict(attention_backend="reference")], ids=str)
def test_the_engine_prepares_each_step_once(options: dict, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per layer, and not only if the batch changed."""
    core = make_core(make_checkpoint("llama", tmp_path), **options)
    backend, prepared, steps = core.runner.backend, [], []
    prepare, step = backend.prepare, core.step

    def counted(metadata: AttentionMetadata) -> object:
        prepared.append(metadata)
        return prepare(metadata)

    monkeypatch.setattr(backend, "prepare", counted)
    monkeypatch.setattr(core, "step", lambda: steps.append(None) or step())
    run(core, [[1, 2, 3], [4] * 20], [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 2)
    assert len(prepared) == len(steps) >= 6
