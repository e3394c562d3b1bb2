"""Launches on the meta device, whose tensors have no contents, so that reading one fails: a copy there, a copy back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from nightly import nightly_but
from offline import make_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight.device.device_queue import HostQueue
from inflight.engine.assembly import make_core
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput
from inflight.loading.loader import load
from inflight.runner import base_runner as base
from inflight.runner.device_runner import DeviceRunner
from inflight.sampling.reference_sampling import ReferenceSampling

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Notes copies between host and device, and makes those from the meta device, which would fail, do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device: list[int] = []
        self.to_host: list[int] = []
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append(str(func))
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if target.is_cpu and source.is_meta:
                assert kwargs.get("non_blocking") or args[2:] == (True,), "the host waits for this copy"
                self.to_host.append(source.nbytes)
                return target.zero_()
            if target.is_meta and source.is_cpu and source.dim():
                assert kwargs.get("non_blocking") or args[2:] == (True,), "pageable, or waited for"
                self.to_device.append(source.nbytes)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        devices = {leaf.device for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        assert len(devices) < 2, f"{func} copies between host and device beside the packed copy"
        return result


class MetaSampling(ReferenceSampling):
    draws = True

    def choose(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(len(logits), dtype=torch.int64, device=META)


@pytest.fixture
def core(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """An engine whose device is meta, with a fake sampling kernel."""
    torch.set_num_threads(1)
    path = make_checkpoint("llama", tmp_path)
    options = dict(native_forward=False, attention_backend="reference", block_size=4, max_num_seqs=8)
    config = make_config(path, async_scheduling=True, **options)
    loaded = load(config)
    loaded.model.to(META)
    for cache in loaded.layers.caches:
        cache.key, cache.value = cache.key.to(META), cache.value.to(META)
    loaded.device = META
    monkeypatch.setattr(base, "select_sampling", lambda device: MetaSampling())
    return make_core(config, DeviceRunner(config, loaded, HostQueue()))


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [dict(temperature=0.0)],
    "random": [dict(), dict(top_k=5), dict(top_p=0.5, min_p=0.1), dict(temperature=0.0)],
    "rules": [
        dict(repetition_penalty=1.2, logit_bias={3: 1.0}),
        dict(presence_penalty=0.5, min_tokens=18, stop_token_ids=[4]),
        dict(allowed_token_ids=[1, 2, 3]),
        dict(temperature=0.0, bad_words_ids=[[3], [4, 5]]),
    ],
}


FORBIDDEN = ("item", "_local_scalar_dense", "nonzero", "unique", "masked_select", "equal.default")


@pytest.mark.parametrize("kind", nightly_but(["rules"], KINDS))
def test_a_decode_step_is_one_copy_there_and_one_back(core: EngineCore, kind: str) -> None:
    """While the step before it runs, with rows whose block tables grow."""
    steps: list[tuple[SchedulerOutput, Copies]] = []
    launch = core.runner.launch

    def watched(out: SchedulerOutput) -> Any:
        with Copies() as copies:
            ticket = launch(out)
        steps.append((out, copies))
        return ticket

    core.runner.launch = watched  # type: ignore[method-assign]
    for number, params in enumerate(KINDS[kind]):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, **params)
        assert core.add_request(AddRequest(number, [7] * (5 + number), sampling)) is None
    while core.has_work:
        core.step()
    decodes = [(out, copies) for out, copies in steps if not out.new_rows]
    assert len(decodes) >= 15
    assert any(out.new_block_ids for out, _ in decodes)
    for out, copies in decodes:
        assert copies.to_host == [8 * len(out.slots)], "the sampled tokens"
        assert len(copies.to_device) == 1
        assert copies.to_device[0] < 4096
        assert not [call for call in copies.calls if any(word in call for word in FORBIDDEN)]
