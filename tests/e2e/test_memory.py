"""Too little memory behind a real tritonserver: every request ends with its tokens, and nothing thrashes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline import make_core, run, tokens
from wire import GrpcStream, gauges

from inflight.engine.sampling_params import SamplingParams
from inflight_tools.launcher import TritonServer

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint"
COUNT, BLOCK_SIZE, MAX_MODEL_LEN = 48, 16, 256
MODELS: dict[str, dict] = {
    "predicting": {"speculative_config": {"model": str(CHECKPOINT), "kv_cache_memory": "8MiB"}},
    "swapping": {
        "admission": "free_blocks",
        "swap_space": "1MiB",
        "preemption_mode": "swap",
        "speculative_config": {"method": "suffix"},
    },
}


def workload() -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths that need ten times the blocks of the longest possible request."""
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 200) for _ in range(rng.randrange(4, 40))] for _ in range(COUNT)]
    return prompts, [rng.randrange(15, 60) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def squeezed(triton_installed, tmp_path_factory) -> Iterator[TritonServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    options = {
        "model": str(CHECKPOINT),
        "dtype": "float32",
        "device": "cpu",
        "cpu_threads": 1,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE,
        "enable_prefix_caching": False,
    }
    for name, changes in MODELS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps({**options, **changes}))
        (version.parent / "config.pbtxt").write_text('backend: "inflight"\n')
    with TritonServer(repository, exit_timeout=5) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    prompts, lengths = workload()
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    offline = run(make_core(str(CHECKPOINT)), prompts, params)
    return [tokens(offline[index, 0]) for index in range(COUNT)]


def serve_all(server: TritonServer, model: str) -> tuple[list[list[int]], dict[str, float]]:
    """Output tokens of all requests, sent at once, and the model's metrics with those of the last step."""
    prompts, lengths = workload()
    names = [str(index) for index in range(COUNT)]
    with GrpcStream(server.grpc_address, model) as stream:
        for name, prompt, length in zip(names, prompts, lengths):
            params = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
            stream.send(name, input_ids=prompt, stream=True, return_token_ids=True, sampling_parameters=params)
        stream.wait(*names)
        assert not [answer.error for answer in stream.answers.values() if answer.error]
        said = [stream.answers[name].token_ids for name in names]
    deadline = time.monotonic() + 10
    while True:
        now = gauges(server.metrics_address, model)
        held = now["inflight_kv_blocks_used"] + now["inflight_requests_running"]
        if now.get("vllm:request_params_n_count", 0) == COUNT and not held:
            return said, now
        assert time.monotonic() < deadline, f"the metrics are not published, or blocks were lost: {now}"
        time.sleep(0.1)


def test_a_pool_of_a_tenth_of_the_demand_serves_all_without_a_preemption_storm(squeezed, expected):
    prompts, lengths = workload()
    demand = sum(-(-(len(prompt) + length) // BLOCK_SIZE) for prompt, length in zip(prompts, lengths))
    assert demand >= 10 * MAX_MODEL_LEN // BLOCK_SIZE
    said, metrics = serve_all(squeezed, "predicting")
    assert said == expected
    assert metrics["inflight_requests_preempted_total"] <= COUNT / 2


def test_swapped_requests_with_drafts_get_the_same_tokens(squeezed, expected):
    said, metrics = serve_all(squeezed, "swapping")
    assert said == expected
    assert metrics["inflight_requests_preempted_total"] > 0
    assert metrics["inflight_swapped_in_blocks_total"] > 0
    assert metrics["inflight_host_blocks_used"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_drafts_are_counted(squeezed, model):
    """A text that goes round in circles, alone: copies pay.  A model that drafts for itself at least probes."""
    ids = [300, 301, 302, 303, 304] * 20
    params = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
    names = [f"vllm:spec_decode_num_{kind}_total" for kind in ("drafts", "draft_tokens", "accepted_tokens")]

    def counts() -> list[float]:
        now = gauges(squeezed.metrics_address, model)
        return [now.get(name, 0.0) for name in names]

    before = counts()
    with GrpcStream(squeezed.grpc_address, model) as stream:
        stream.send("a", input_ids=ids, stream=True, return_token_ids=True, sampling_parameters=params)
        stream.wait("a")
        assert len(stream.answers["a"].token_ids) == 150
    deadline = time.monotonic() + 10
    while True:
        drafts, tokens_tried, accepted = (now - then for now, then in zip(counts(), before))
        if drafts:
            assert tokens_tried >= drafts and 0 <= accepted <= tokens_tried
            return
        assert time.monotonic() < deadline, "no drafts"
        time.sleep(0.1)
