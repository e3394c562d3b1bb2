"""One response for all prompts of a request for vectors, whatever happens to each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer

from inflight.engine.attached import Attached
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.pooling import Pooling
from inflight.frontend.errors import RequestError
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.output.pooled_group import PooledGroup, PooledGroups
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.pooled_prompts import PooledPlan
from inflight.frontend.request.pooled_request import PooledRequest, void_params
from inflight.frontend.request.tokenize_pool import TokenizePool

NO_STATS = StepStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
WIRE = WireRequest({"pooling": np.array([b"{}"], dtype=np.object_)})


class Engine:
    """Records what it is given."""

    def __init__(self) -> None:
        self.submitted: list[AddRequest] = []
        self.resubmitted: list[AddRequest] = []
        self.aborted: set[int] = set()
        self.full_after = 10**6

    def submit(self, request: AddRequest) -> None:
        if len(self.submitted) >= self.full_after:
            raise RequestError("UNAVAILABLE", "the queue is full", retry_after=1.0)
        self.submitted.append(request)

    def resubmit(self, requests: Any, hold_new: bool = False, settled: bool = True) -> None:
        self.resubmitted += requests

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.add(request_id)

    def release(self, request_id: int) -> None: ...


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def stats() -> RecordingStats:
    return RecordingStats()


@pytest.fixture
def processor(engine: Any, stats: RecordingStats) -> Iterator[OutputProcessor]:
    made = OutputProcessor(demo_tokenizer(), engine, stats, lambda line: pytest.fail(line), check_seconds=0.005)
    made.start()
    yield made
    made.stop("the test is over")


def request(prompts: list[list[int]], pairs: Any = None, **options: Any) -> PooledRequest:
    pooling = Pooling("embed")
    plan = PooledPlan(prompts, pooling, pairs, options.pop("labels", []))
    fields: dict[str, Any] = {"attached": Attached(pooling=pooling), "arrival": time.monotonic()}
    members = [ParsedRequest(AddRequest(0, prompt, void_params(), **fields)) for prompt in prompts]
    return PooledRequest(plan, members, **{"as_text": False, "returns": frozenset(), **options})


def opened(processor: OutputProcessor, asked: PooledRequest) -> RecordingClient:
    client = RecordingClient()
    PooledGroups(lambda wire: asked, processor.open).open(WIRE, client)
    return client


def vector(request_id: int, *values: float) -> SequenceDelta:
    pooled = np.array(values, dtype=np.float32).tobytes()
    return SequenceDelta(request_id, 0, [], "stop", num_cached_tokens=0, pooled=pooled)


def step(*deltas: SequenceDelta, failed: Any = ()) -> StepMessage:
    return StepMessage(list(deltas), NO_STATS, failed=list(failed))


def ids(engine: Engine) -> list[int]:
    return [message.request_id for message in engine.submitted]


def test_one_response_in_the_order_of_the_inputs(processor: Any, engine: Engine, stats: RecordingStats) -> None:
    client = opened(processor, request([[1, 2], [3], [4, 5, 6]], labels=["a", "b"]))
    first, second, third = ids(engine)
    processor.on_step(step(vector(third, 5, 6), vector(first, 1, 2)))
    assert not client.ended.is_set()
    processor.on_step(step(vector(second, 3, 4)))
    (found,) = client.wait().responses
    assert found["pooled"].tolist() == [[1, 2], [3, 4], [5, 6]] and found["pooled"].dtype == np.float32
    assert found["pooled_token_counts"].tolist() == [2, 1, 3] and found["pooled_token_counts"].dtype == np.int32
    assert found["labels"].tolist() == [b"a", b"b"]
    assert len(stats.first_tokens) == 3, "prompt tokens are counted at the first token"
    assert len(stats.streams) == 3 and stats.num_tokens == 0
    assert processor.num_open == 0


def test_pairs_share_their_prompts(processor: Any, engine: Engine) -> None:
    client = opened(processor, request([[1, 2], [3], [4]], pairs=[(0, 1), (0, 2)]))
    processor.on_step(step(*[vector(i, *values) for i, values in zip(ids(engine), ([1, 0], [0.5, 0], [0, 1]))]))
    (found,) = client.wait().responses
    assert found["pooled"].tolist() == [[0.5], [0]] and found["pooled_token_counts"].tolist() == [3, 3]


def test_vllm_backends_answer(processor: Any, engine: Engine) -> None:
    returns = frozenset({"return_num_input_tokens", "return_num_output_tokens"})
    client = opened(processor, request([[1, 2]], as_text=True, returns=returns))
    processor.on_step(step(vector(*ids(engine), 0.5, -1)))
    (found,) = client.wait().responses
    assert json.loads(found["text_output"][0]) == [0.5, -1.0]
    assert (found["num_input_tokens"].tolist(), found["num_output_tokens"].tolist()) == ([2], [0])


def test_a_prompt_that_fails_ends_its_request_and_no_other(processor: Any, engine: Engine) -> None:
    bad, good = opened(processor, request([[1], [2], [3]])), opened(processor, request([[4]]))
    first, second, third, other = ids(engine)
    processor.on_step(step(vector(first, 1), failed=[RequestFailed(second, "INTERNAL", "not finite")]))
    assert bad.wait().error == ("INTERNAL", "inputs[1]: not finite")
    processor.on_step(step(vector(third, 1), vector(other, 2)))  # too late
    assert good.wait().responses[0]["pooled"].tolist() == [[2]]
    assert bad.finals == 1


def test_the_others_of_a_failed_request_are_aborted(processor: Any, engine: Engine) -> None:
    client = opened(processor, request([[1], [2]]))
    first, second = ids(engine)
    processor.on_request_failed(RequestFailed(first, "UNAVAILABLE", "the queue is full; retry in 1.0 s"))
    assert client.wait().error == ("UNAVAILABLE", "the queue is full; retry in 1.0 s")
    wait_until(lambda: second in engine.aborted and processor.num_open == 0)


def test_a_queue_that_is_full_half_way(processor: Any, engine: Engine) -> None:
    engine.full_after = 1
    client = opened(processor, request([[1], [2], [3]]))
    assert client.wait().error == ("UNAVAILABLE", "the queue is full; retry in 1.0 s")
    wait_until(lambda: processor.num_open == 0)
    assert engine.aborted >= set(ids(engine))


def test_a_response_that_cannot_be_sent_ends_in_an_error(engine: Any, stats: RecordingStats) -> None:
    logged: list[str] = []
    processor = OutputProcessor(demo_tokenizer(), engine, stats, logged.append)
    processor.start()
    client = RecordingClient(broken=True)
    PooledGroups(lambda wire: request([[1], [2]]), processor.open).open(WIRE, client)
    first, second = ids(engine)
    processor.on_step(step(vector(first, 1), vector(second, 2)))
    assert client.wait().error == ("INTERNAL", "RuntimeError: cannot reach the client") and logged
    processor.stop("the test is over")


def test_a_client_that_cancels(processor: Any, engine: Engine) -> None:
    client = opened(processor, request([[1], [2]]))
    client.cancelled = True
    assert client.wait().error == ("CANCELLED", "Request was cancelled")
    wait_until(lambda: processor.num_open == 0)
    assert engine.aborted == set(ids(engine))


def test_prompts_of_an_engine_that_dies_start_anew(processor: Any, engine: Engine) -> None:
    client = opened(processor, request([[1, 2], [3, 4]]))
    first, second = ids(engine)
    processor.on_step(step(vector(first, 1)))
    processor.on_engine_down([second], {second: {0}}, "killed")
    wait_until(lambda: engine.resubmitted)
    (again,) = engine.resubmitted
    assert (again.request_id, again.prompt_token_ids, again.replayed) == (second, [3, 4], True)
    assert again.output_token_ids == [[]] and again.attached == Attached(pooling=Pooling("embed"))
    processor.on_step(step(vector(second, 2)))
    assert client.wait().responses[0]["pooled"].tolist() == [[1], [2]]


def test_a_prompt_that_cannot_be_opened_is_answered_once(engine: Engine) -> None:
    opened_ones: list[Any] = []

    def open_stream(member: Any, responder: Any) -> None:
        if opened_ones:
            raise MemoryError("no room")
        opened_ones.append(responder)

    client = RecordingClient()
    with pytest.raises(MemoryError):  # the caller answers
        PooledGroups(lambda wire: request([[1], [2]]), open_stream).open(WIRE, client)
    assert opened_ones[0].is_cancelled()
    opened_ones[0].fail("CANCELLED", "Request was cancelled")
    assert client.finals == 0


def test_the_pool_of_threads_opens_them(engine: Engine) -> None:
    taken: list[WireRequest] = []
    processor: Any = SimpleNamespace(reject=lambda responder, error: None)
    pool = TokenizePool(
        lambda wire: pytest.fail("parsed as text"),
        processor,
        lambda line: None,
        open_pooled=lambda wire, responder: taken.append(wire),
    )
    pool.take(WIRE, RecordingClient())
    assert taken == [WIRE]


def test_a_group_asks_its_client_seldom() -> None:
    asked = []
    client: Any = SimpleNamespace(is_cancelled=lambda: asked.append(1) or False)
    group = PooledGroup(request([[1]]), client)
    assert not any(group.is_cancelled() for _ in range(100))
    assert len(asked) < 100


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
