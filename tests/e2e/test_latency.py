"""A long prompt beside running streams, through a real server: what the engine planned, from its step trace.

The policy is responsible for chunks and planned seconds; `bench/itl.py` measures how long the steps then take.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from model_entries import loaded
from wire import GrpcStream

from inflight.engine.policies.budget import MIN_CHUNK, STARVED_STEPS
from inflight.engine.policies.cost_model import OnlineStepCost, StepLoad
from inflight.engine.step_trace import StepRecord, Trace
from inflight_tools.launcher import TritonServer
from inflight_tools.trace.files import fetch_trace

# tests/backend/engine/policies/test_budget.py has the policy, tests/backend/test_served_options.py the option.
pytestmark = pytest.mark.nightly

OPTIONS = {
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
    "step_trace": True,
    "check_on_load": False,
}
TARGET_MS = 20.0
PROMPT = [5 + k % 1000 for k in range(1200)]
STREAMS, TOKENS = 4, 1900


@pytest.fixture(scope="module")
def target(triton: TritonServer) -> Iterator[TritonServer]:
    with loaded(triton, target={"itl_target_ms": TARGET_MS, **OPTIONS}) as server:
        yield server


@pytest.fixture(scope="module")
def unreachable(triton: TritonServer) -> Iterator[TritonServer]:
    with loaded(triton, unreachable={"itl_target_ms": 0.001, **OPTIONS}) as server:
        yield server


def long_prompt_beside_streams(server: TritonServer, model: str) -> tuple[Trace, list[int]]:
    """The trace, and the tokens of the request with the long prompt."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    names = [f"stream {number}" for number in range(STREAMS)]
    with GrpcStream(server.grpc_address, model) as stream:
        for number, name in enumerate(names):
            params = {**greedy, "max_tokens": TOKENS}
            stream.send(name, input_ids=[7 + number] * 20, stream=[True], sampling_parameters=params)
        for name in names:
            stream.wait_chunks(name, 2)
        params = {**greedy, "max_tokens": 5}
        stream.send("long", input_ids=PROMPT, stream=[True], sampling_parameters=params, return_token_ids=True)
        stream.wait("long", *names)
        assert not any(answer.error for answer in stream.answers.values())
        tokens = stream.answers["long"].token_ids
    return fetch_trace(server.http_address, model), tokens


def load_of(step: StepRecord) -> StepLoad:
    load = StepLoad()
    for tokens, computed in zip(step.tokens, step.computed):
        if tokens == 1:
            load = load._replace(decodes=load.decodes + 1, context_tokens=load.context_tokens + computed + 1)
        else:
            load = load.with_prefill(computed, tokens)
    return load


def chunks_beside_decodes(trace: Trace) -> list[int]:
    """Tokens of the long prompt in each step from its arrival to its first token; 0 where it was left out."""
    (key,) = [request.key for request in trace.requests if request.num_prompt_tokens == len(PROMPT)]
    (arrival,) = [request.arrival for request in trace.requests if request.key == key]
    found: list[int] = []
    done = 0
    for step in trace.steps:
        if step.start < arrival or done == len(PROMPT):
            continue
        chunk = dict(zip(step.keys, step.tokens)).get(key, 0)
        assert 1 in step.tokens, "the streams decode in every step"
        found.append(chunk)
        done += chunk
    assert done == len(PROMPT)
    return found


def test_a_long_prompt_gets_chunks_that_keep_the_streams_within_the_target(target):
    trace, _ = long_prompt_beside_streams(target, "target")
    # Replay the trace's steps into the cost model: what the engine expected of each step.
    model = OnlineStepCost()
    for step in trace.steps:
        load = load_of(step)
        if load.decodes and load.prefill_tokens > MIN_CHUNK:
            assert model.cost.seconds(load) <= 1.05 * TARGET_MS / 1000, f"step {step.number}: {load}"
        model.observe(load, step.schedule + step.forward + step.sample)
    assert sum(chunks_beside_decodes(trace)) == len(PROMPT)


def test_under_a_target_that_cannot_be_met_a_long_prompt_still_progresses(target, unreachable):
    """At the documented rate, and with the same output tokens."""
    _, tokens = long_prompt_beside_streams(target, "target")
    trace, same = long_prompt_beside_streams(unreachable, "unreachable")
    assert same == tokens
    chunks = chunks_beside_decodes(trace)
    granted = [place for place, chunk in enumerate(chunks) if chunk]
    assert {chunks[place] for place in granted[:-1]} == {MIN_CHUNK}
    # From the first chunk on: some steps ran between the prompt's arrival at the frontend and at the engine.
    gaps = [after - before for before, after in pairwise(granted)]
    assert set(gaps) == {STARVED_STEPS}, "and no faster: the streams come first"
    assert len(chunks) - granted[0] <= STARVED_STEPS * -(-len(PROMPT) // MIN_CHUNK)
