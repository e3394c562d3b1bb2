"""Too little memory behind a real tritonserver: every request ends with its tokens, and nothing thrashes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline import make_core, run, tokens
from wire import GrpcStream, gauges, post

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


def draft_counts(server: TritonServer, model: str) -> list[float]:
    """Drafts, their tokens, and those that were accepted."""
    now = gauges(server.metrics_address, model)
    kinds = ("drafts", "draft_tokens", "accepted_tokens")
    return [now.get(f"vllm:spec_decode_num_{kind}_total", 0.0) for kind in kinds]


def more_drafts(server: TritonServer, model: str, before: list[float]) -> list[float]:
    """What was counted since, once there is something."""
    deadline = time.monotonic() + 10
    while True:
        found = [now - then for now, then in zip(draft_counts(server, model), before)]
        if found[0]:
            return found
        assert time.monotonic() < deadline, "no drafts"
        time.sleep(0.1)


def engine_of(server: TritonServer, model: str) -> int:
    """Process id of the model's engine."""
    url = f"http://{server.http_address}/v2/models/{model}/generate"
    status, body = post(url, {"text_input": "", "control": "stats"})
    assert status == 200, body
    return json.loads(json.loads(body)["text_output"])["engine"]["pid"]


@pytest.mark.parametrize("model", MODELS)
def test_drafts_are_counted(squeezed, model):
    """A text that goes round in circles, alone.  Copies pay, unless the machine is so busy that a step's seconds tell
    nothing; then a probe is due after 128 tokens, or after the pause that has begun: 64 tokens more."""
    ids = [300, 301, 302, 303, 304] * 5
    params = {"max_tokens": 220, "ignore_eos": True, "temperature": 0}
    before = draft_counts(squeezed, model)
    with GrpcStream(squeezed.grpc_address, model) as stream:
        stream.send("a", input_ids=ids, stream=True, return_token_ids=True, sampling_parameters=params)
        stream.wait("a")
        assert len(stream.answers["a"].token_ids) == 220
    drafts, tokens_tried, accepted = more_drafts(squeezed, model, before)
    assert tokens_tried >= drafts and 0 <= accepted <= tokens_tried


@pytest.mark.parametrize("model", MODELS)
def test_a_killed_engine_that_drafts_loses_no_token(squeezed, model):
    """The pool has room for one of two requests.  The next engine process has to learn anew what pays."""
    params = [
        {"max_tokens": 150, "ignore_eos": True, "temperature": 0},
        {"max_tokens": 140, "ignore_eos": True, "temperature": 0.4, "seed": 5},
    ]

    def serve(kill: bool) -> list[list[int]]:
        engine = engine_of(squeezed, model)
        with GrpcStream(squeezed.grpc_address, model) as stream:
            for index, options in enumerate(params):
                ids = [300 + index, 301, 302, 303, 304] * 20
                stream.send(str(index), input_ids=ids, stream=True, return_token_ids=True, sampling_parameters=options)
            if kill:
                stream.wait_chunks("0", 1)
                os.kill(engine, signal.SIGKILL)  # in the middle of whatever it does
            stream.wait("0", "1")
            assert not [answer.error for answer in stream.answers.values() if answer.error]
            return [stream.answers[str(index)].token_ids for index in range(2)]

    expected = serve(kill=False)
    assert [len(ids) for ids in expected] == [150, 140]
    before = draft_counts(squeezed, model)
    for _ in range(10):  # a busy client may see the first response when all have been sent
        assert serve(kill=True) == expected
        if gauges(squeezed.metrics_address, model).get("inflight_requests_replayed_total", 0.0):
            break
    else:
        raise AssertionError("every kill came too late")
    assert more_drafts(squeezed, model, before)
