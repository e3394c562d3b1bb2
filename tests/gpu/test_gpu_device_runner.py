"""Steps that are launched ahead on a GPU: the host waits for none of them, and the tokens are the CPU's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, run, tokens
from step_inputs_rig import compare_steps

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.step_upload import upload_bytes

CUDA = torch.device("cuda")
KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(top_k=20, repetition_penalty=1.2),
    dict(top_p=0.8, presence_penalty=0.5, frequency_penalty=0.4),
    dict(temperature=0.0, min_tokens=5, stop_token_ids=[3, 4, 5], repetition_penalty=1.1),
    dict(temperature=0.8, logit_bias={7: 4.0, 9: -50.0}),
    dict(min_p=0.05, allowed_token_ids=list(range(0, VOCAB, 3))),
    dict(temperature=0.8, bad_words_ids=[[11], [12, 13]]),
]
ROOMY: dict[str, Any] = sized(dict(kv_cache_memory="64MiB"), {})  # for all requests at once
SQUEEZED = dict(num_gpu_blocks_override=sized(80, 16), max_num_batched_tokens=50, block_size=4)
LIMITS: dict[str, Any] = sized({}, dict(max_num_seqs=5, max_model_len=64))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", Path(tmp_path_factory.mktemp("device")), head_dim=64)


def requests(count: int, kinds: list[dict[str, Any]]) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, sized(60, 25)))] for _ in range(count)]
    params = [
        SamplingParams(seed=i, max_tokens=sized(20, 7), ignore_eos=True, **kinds[i % len(kinds)]) for i in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(async_scheduling=False, enforce_eager=True),
        dict(SQUEEZED),
        dict(SQUEEZED, swap_space="1MiB"),
    ],
    ids=["ahead", "eager, one at a time", "preempting", "swapping"],
)
def test_every_rule_gives_the_tokens_of_the_cpu(
    checkpoint: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompts, params = requests(sized(42, 14 if options else 7), KINDS)
    expected = run(make_core(checkpoint, device="cpu", **LIMITS), prompts, params)
    if options:
        request.getfixturevalue("any_kernels")
    if "swap_space" in options:
        options = dict(options, preemption_mode="swap")
    core = make_core(checkpoint, **{"device": "cuda", "async_scheduling": True, **ROOMY, **LIMITS, **options})
    assert isinstance(core.runner, DeviceRunner)
    got = run(core, prompts, params)
    assert {key: tokens(deltas) for key, deltas in got.items()} == {k: tokens(d) for k, d in expected.items()}
    assert (core.scheduler.num_preempted_total > 0) == ("block_size" in options)


@pytest.mark.usefixtures("any_kernels")
def test_a_launch_waits_for_nothing(checkpoint: str) -> None:
    """Prompts and decodes with every rule, eager and by graphs."""
    core = make_core(checkpoint, device="cuda", async_scheduling=True, max_num_batched_tokens=64, **ROOMY, **LIMITS)
    prompts, params = requests(sized(24, 9), KINDS)
    run(core, prompts[:8], params[:8])  # compiles what is left
    launch = core.runner.launch

    def strict(out: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(out)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.runner.launch = strict  # type: ignore[method-assign]
    for number, (prompt, sampling) in enumerate(zip(prompts, params)):
        assert core.add_request(AddRequest(100 + number, prompt, sampling)) is None
    while core.has_work:
        core.step()
    assert core.runner.num_collected_first == 0


@pytest.mark.parametrize("limits", [(5, 24, 4), sized((40, 4000, 16), (9, 200, 16))])
def test_inputs_equal_their_definition(limits: tuple[int, int, int]) -> None:
    for seed in range(sized(5, 2)):
        compare_steps(random.Random(seed), limits, upload_bytes(limits[0], limits[1]), CUDA)
