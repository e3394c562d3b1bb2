"""A NaN anywhere in a model: its requests fail by name, and no client gets a token of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, tokens
from safetensors.torch import load_file, save_file

from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.load_errors import LoadError
from inflight.loading.recognise import attention_probe as probe
from inflight.sampling import UNUSABLE_LOGITS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NAN_ID = VOCAB - 2
LAYER = "model.layers.0."
WEIGHTS = [
    *(LAYER + f"self_attn.{name}_proj.weight" for name in "qkv"),
    LAYER + "mlp.down_proj.weight",
    LAYER + "input_layernorm.weight",
    "lm_head.weight",
]
PASSES: list[dict[str, Any]] = [
    dict(),
    dict(dtype="bfloat16"),
    dict(quantization="int8"),
    dict(quantization="int8", dtype="bfloat16", kv_cache_dtype="int8"),
    dict(native_forward=False),
    dict(native_forward=False, attention_backend="reference"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    yield Path(make_checkpoint("llama", tmp_path_factory.mktemp("nan")))
    log.setLevel(before)


def poisoned(checkpoint: Path, folder: Path, name: str, place: tuple[int, ...]) -> str:
    """A copy of the checkpoint with one NaN."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[name][place[: weights[name].dim()]] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def serve(core: EngineCore, requests: list[AddRequest]) -> tuple[dict[int, list[SequenceDelta]], list[RequestFailed]]:
    deltas: dict[int, list[SequenceDelta]] = {}
    failed = []
    for request in requests:
        assert core.add_request(request) is None
    while core.has_work:
        message = core.step()
        check_core(core)
        failed += message.failed
        for delta in message.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas, failed


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded without a look at their logits: a NaN may be where no probe reaches it."""
    monkeypatch.setattr(probe, "_check_finite", lambda kind, logits: None)
    monkeypatch.setattr(probe, "_keeps_logits", lambda kind, kept, whole: True)


@pytest.mark.parametrize("check", [True, False])
def test_a_checkpoint_with_nan_is_refused_by_name(llama: Path, tmp_path: Path, check: bool) -> None:
    path = poisoned(llama, tmp_path, WEIGHTS[2], (5, 7))
    with pytest.raises(LoadError, match=r"its logits in torch.float32 are not finite .* weights contain NaN"):
        make_core(path, check_on_load=check)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("options", PASSES[:-1], ids=repr)  # torch's own attention drops a score that is NaN
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_nan_in_any_weight_is_seen(llama: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    core = make_core(poisoned(llama, tmp_path, name, (5, 7)), check_on_load=False, **options)
    deltas, failed = serve(core, [AddRequest(1, [3, 1, 4, 1, 5], GREEDY)])
    assert failed == [RequestFailed(1, "INTERNAL", UNUSABLE_LOGITS)]
    assert not deltas


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", PASSES, ids=repr)
def test_the_other_rows_get_the_tokens_that_they_get_alone(
    llama: Path, tmp_path: Path, options: dict[str, Any], overlap: bool
) -> None:
    """A NaN in one token's embedding spoils the prompts with that token, at any place in them."""
    path = poisoned(llama, tmp_path, "model.embed_tokens.weight", (NAN_ID, 7))
    core = make_core(path, check_on_load=False, async_scheduling=overlap, max_num_batched_tokens=16, **options)
    prompts = [[3, 1, 4, 1, 5] * 4, [NAN_ID, *[9] * 30], [2, 7, 1, 8], [*[6] * 20, NAN_ID]]
    sampled = SamplingParams(max_tokens=8, seed=5, top_p=0.9, repetition_penalty=1.1, logprobs=1, ignore_eos=True)
    params = [GREEDY, sampled, sampled, GREEDY]
    deltas, failed = serve(core, [AddRequest(i, *both) for i, both in enumerate(zip(prompts, params))])
    assert {failure.request_id for failure in failed} == {1, 3}
    assert not {1, 3} & deltas.keys()
    assert core.pool.num_used == 0
    for request_id in (0, 2):
        alone, _ = serve(core, [AddRequest(9, prompts[request_id], params[request_id])])
        assert tokens(deltas[request_id]) == tokens(alone[9])
        assert len(tokens(alone[9])) == 8


def test_infinite_logits_are_seen(llama: Path, tmp_path: Path) -> None:
    """float16 overflows where float32 does not, and the message names the way out."""
    core = make_core(str(llama), native_forward=False)
    head = core.runner.model.get_output_embeddings()
    with torch.no_grad():
        head.weight[11] = float("inf")
    deltas, failed = serve(core, [AddRequest(1, [3, 1, 4], GREEDY)])
    assert [failure.code for failure in failed] == ["INTERNAL"]
    assert '"dtype": "float32"' in failed[0].message
    assert not deltas
