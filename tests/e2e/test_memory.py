"""Too little memory behind a real tritonserver: every request ends with its tokens, and nothing thrashes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from model_entries import CHECKPOINT, loaded
from nightly import nightly_but
from offline import make_core, run, tokens
from processes_of import engine_process, open_when_stopped, run_in_turns, tries
from wire import GrpcStream, gauges

from inflight.engine.sampling_params import SamplingParams
from inflight_client import Client
from inflight_tools.launcher import TritonServer

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


@pytest.fixture(scope="module", params=nightly_but(["swapping"], MODELS))
def squeezed(request: pytest.FixtureRequest, triton: TritonServer) -> Iterator[str]:
    """The name of a model with too little memory."""
    name = str(request.param)
    options = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE,
        "enable_prefix_caching": False,
    }
    with loaded(triton, **{name: {**options, **MODELS[name]}}):
        yield name


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
    deadline = time.monotonic() + 60
    while True:
        now = gauges(server.metrics_address, model)
        held = now["inflight_kv_blocks_used"] + now["inflight_requests_running"]
        if now.get("vllm:request_params_n_count", 0) == COUNT and not held:
            return said, now
        assert time.monotonic() < deadline, f"the metrics are not published, or blocks were lost: {now}"
        time.sleep(0.1)


def test_a_pool_of_a_tenth_of_the_demand_serves_all(triton, squeezed, expected):
    """Without a preemption storm where peaks are predicted; swapped blocks come back with their contents."""
    prompts, lengths = workload()
    demand = sum(-(-(len(prompt) + length) // BLOCK_SIZE) for prompt, length in zip(prompts, lengths))
    assert demand >= 10 * MAX_MODEL_LEN // BLOCK_SIZE
    said, metrics = serve_all(triton, squeezed)
    assert said == expected
    if squeezed == "predicting":
        assert metrics["inflight_requests_preempted_total"] <= COUNT / 2
    else:
        assert metrics["inflight_requests_preempted_total"] > 0
        assert metrics["inflight_swapped_in_blocks_total"] > 0
        assert metrics["inflight_host_blocks_used"] == 0


def drafts_of(server: TritonServer, model: str) -> list[float]:
    """Drafts, draft tokens and accepted draft tokens so far."""
    now = gauges(server.metrics_address, model)
    kinds = ("drafts", "draft_tokens", "accepted_tokens")
    return [now.get(f"vllm:spec_decode_num_{kind}_total", 0.0) for kind in kinds]


def serve_until_drafted(server: TritonServer, model: str, before: list[float]) -> list[float]:
    """Send repetitive texts, one after the other, until drafts were counted; returns the increase of `drafts_of`.

    Copies pay, unless the machine is so busy that a step's seconds tell nothing; then a probe is due after 128 tokens,
    or after the pause that has begun: 64 tokens more.
    """
    params = {"max_tokens": 220, "ignore_eos": True, "temperature": 0}
    for _ in range(20):
        with GrpcStream(server.grpc_address, model) as stream:
            ids = [300, 301, 302, 303, 304] * 5
            stream.send("a", input_ids=ids, stream=True, return_token_ids=True, sampling_parameters=params)
            stream.wait("a")
            assert len(stream.answers["a"].token_ids) == 220
        found = [now - then for now, then in zip(drafts_of(server, model), before)]
        if found[0]:
            return found
    raise AssertionError("20 requests and no draft")


def test_drafts_are_counted(triton, squeezed):
    drafts, tokens_tried, accepted = serve_until_drafted(triton, squeezed, drafts_of(triton, squeezed))
    assert tokens_tried >= drafts and 0 <= accepted <= tokens_tried


def test_a_killed_engine_that_drafts_loses_no_token(triton, squeezed):
    """The pool has room for one of two requests.  The next engine process learns anew what pays."""
    params = [
        {"max_tokens": 220, "ignore_eos": True, "temperature": 0},
        {"max_tokens": 210, "ignore_eos": True, "temperature": 0.4, "seed": 5},
    ]

    was_open = 0

    def serve(kill: bool) -> list[list[int]]:
        nonlocal was_open
        engine = engine_process(triton, squeezed)
        with GrpcStream(triton.grpc_address, squeezed) as stream:
            if kill:
                engine.suspend()
            for index, options in enumerate(params):
                ids = [300 + index, 301, 302, 303, 304] * 5
                stream.send(str(index), input_ids=ids, stream=True, return_token_ids=True, sampling_parameters=options)
            if kill:
                run_in_turns(engine, lambda seconds: stream.has_chunks("0", 1, seconds))
                with Client(triton.grpc_address, model=squeezed) as client:
                    was_open = open_when_stopped(client)
                engine.kill()  # in the middle of whatever it does
            stream.wait("0", "1")
            assert not [answer.error for answer in stream.answers.values() if answer.error]
            return [stream.answers[str(index)].token_ids for index in range(2)]

    def replayed() -> float:
        return gauges(triton.metrics_address, squeezed).get("inflight_requests_replayed_total", 0.0)

    def is_interrupted() -> bool:
        before = replayed()
        assert serve(kill=True) == expected
        assert not was_open or replayed() > before
        return was_open > 0

    expected = serve(kill=False)
    assert [len(ids) for ids in expected] == [220, 210]
    assert any(is_interrupted() for _ in tries())
    serve_until_drafted(triton, squeezed, drafts_of(triton, squeezed))
