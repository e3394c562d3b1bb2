"""Pooled requests in scheduler and pool: mixtures with generating ones, limits, policies that learn from lengths."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from engine_rig import Info, PagedHashRunner, add, expected_output, make_core
from hypothesis import given
from hypothesis import strategies as st
from pooled import pooled

from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.policies.vectors_beside import VectorsBeside
from inflight.engine.pooling import Pooling
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.frontend.request.pooled_request import void_params

# The tokens that a kind of vector is made of.
READS = {"last": slice(None), "mean": slice(None), "cls": slice(1)}


class PoolingHashRunner(PagedHashRunner):
    """A vector is a hash of the prompt, read through the block table; a mean's, of the chunks that it has seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kinds: dict[int, str] = {}
        self.seen: dict[int, list[int]] = {}

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        for new in out.new_rows:
            self.kinds.pop(new.slot, None)
            if new.attached is not None and new.attached.pooling is not None:
                self.kinds[new.slot] = new.attached.pooling.kind
        asked = dict(self.kinds)
        longest, self.info.max_model_len = self.info.max_model_len, self.info.max_model_len + 1
        step = super().execute(out, prepared)
        self.info.max_model_len = longest
        for row, slot in enumerate(out.slots):
            if slot not in asked:
                continue
            start, count = out.num_computed_tokens[row], out.num_scheduled_tokens[row]
            if start == 0:
                self.seen[slot] = []
            if asked[slot] != "last":
                assert len(self.seen[slot]) == start, "a mean misses tokens"
                self.seen[slot] += self.tokens[slot][start : start + count]
            if out.samples[row]:
                read = self._read(slot, start + count) if asked[slot] == "last" else self.seen[slot]
                step.token_ids[row] = 0
                step.pooled[row] = vector_of(read, asked[slot])
        return step


def vector_of(tokens: list[int], kind: str) -> bytes:
    return hashlib.blake2b(bytes(tokens[READS[kind]]), digest_size=16).digest()


def core_of(info: Info, **options: Any) -> EngineCore:
    core = make_core(info, **options)
    config = core.config
    core.runner = PoolingHashRunner(info, config.block_size, config.max_num_seqs)
    return core


def results(core: EngineCore, limit: int = 5000) -> tuple[dict[int, bytes], dict[int, list[int]]]:
    vectors: dict[int, bytes] = {}
    tokens: dict[int, list[int]] = {}
    for _ in range(limit):
        if not core.has_work:
            return vectors, tokens
        message = core.step()
        check_core(core)
        assert not message.failed, message.failed
        for delta in message.deltas:
            if delta.pooled is not None:
                assert delta.request_id not in vectors and delta.token_ids == []
                vectors[delta.request_id] = delta.pooled
            else:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    raise AssertionError("a deadlock or livelock")


arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), min_size=1, max_size=64),
        st.sampled_from([None, "last", "last", "mean", "cls"]),
        st.integers(1, 20),
        st.one_of(st.none(), st.none(), st.integers(0, 8)),  # steps until it is aborted
    ),
    min_size=1,
    max_size=12,
)


@given(
    arrivals,
    st.sampled_from([1, 3, 4, 16]),
    st.integers(0, 40),
    st.sampled_from([1, 3, 16, 64, 2048]),
    st.sampled_from([1, 2, 8]),
    st.fixed_dictionaries(
        {
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "admission": st.sampled_from(["free_blocks", "predicted_peak"]),
            "preemption_victim": st.sampled_from(["last", "longest"]),
            "scheduling_policy": st.sampled_from(["fcfs", "sjf"]),
            "short_prompt_share": st.sampled_from([0, 0.9]),
        }
    ),
    st.sampled_from([0, 5, 1000]),
)
def test_mixtures_end_with_their_own_vectors_and_tokens(
    arrivals: list[Any], block_size: int, more: int, budget: int, seats: int, options: dict[str, Any], host: int
) -> None:
    info = Info(num_blocks=-(-64 // block_size) + more, num_host_blocks=host)
    swap = {"swap_space": "1MiB", "preemption_mode": "swap"} if host else {}
    core = core_of(info, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=seats, **options, **swap)
    expected: dict[int, Any] = {}
    aborts: dict[int, int] = {}
    for number, (prompt, kind, max_tokens, abort) in enumerate(arrivals):
        if kind is None:
            prompt = prompt[:40]
            params = add(core, number, prompt, max_tokens=max_tokens)
            expected[number] = expected_output(prompt, params, info)[0]
        else:
            assert core.add_request(pooled(number, prompt, kind)) is None
            expected[number] = vector_of(prompt, kind)
        if abort is not None:
            aborts[number] = abort
    found: dict[int, Any] = {}
    for step in range(5000):
        for number in [number for number, due in aborts.items() if due == step]:
            core.abort(number)
        if not core.has_work:
            break
        message = core.step()
        check_core(core)
        assert not message.failed
        for delta in message.deltas:
            if delta.pooled is not None:
                found[delta.request_id] = delta.pooled
            else:
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert not core.has_work and not core.live_ids and core.pool.num_used == 0
    for number, result in expected.items():
        if number not in aborts:
            assert found[number] == result


def test_a_prompt_of_max_model_len_in_a_pool_of_as_many_blocks() -> None:
    core = core_of(Info(num_blocks=16), block_size=4, max_num_batched_tokens=7)
    prompts = [[1, 2, 3, 4] * 16, [2] * 64]
    for number, prompt in enumerate(prompts):
        assert core.add_request(pooled(number, prompt)) is None
    vectors, _ = results(core)
    assert vectors == {number: vector_of(prompt, "last") for number, prompt in enumerate(prompts)}
    refused = core.add_request(pooled(9, [1] * 65))
    assert refused is not None and "65 tokens: at most 64 fit max_model_len=64" in refused.message


@pytest.mark.parametrize("change", [{"n": 2}, {"max_tokens": 2}, {"logprobs": 0}, {"prompt_logprobs": 1}])
def test_what_concerns_tokens_is_refused(change: dict[str, Any]) -> None:
    message = pooled(1, [1, 2])
    params = msgspec.structs.replace(void_params(), **change)
    refused = core_of(Info()).add_request(msgspec.structs.replace(message, params=params))
    assert refused is not None and "a pooled request has one void token" in refused.message


def test_a_resumed_one_is_refused_and_a_replayed_one_starts_anew() -> None:
    core = core_of(Info())
    refused = core.add_request(msgspec.structs.replace(pooled(1, [1, 2]), output_token_ids=[[3]]))
    assert refused is not None and "earlier output" in refused.message
    replayed = msgspec.structs.replace(pooled(2, [1, 2]), output_token_ids=[[]], replayed=True)
    assert core.add_request(replayed) is None
    assert results(core)[0] == {2: vector_of([1, 2], "last")}


def test_each_counts_against_the_queue() -> None:
    core = core_of(Info(), max_num_seqs=1, max_queue_size=2)
    answers = [core.add_request(pooled(number, [1, 2])) for number in range(4)]
    assert [answer is None for answer in answers] == [True, True, True, False]
    assert answers[3] is not None and answers[3].code == "UNAVAILABLE"


def test_void_tokens_are_neither_counted_nor_learnt_from() -> None:
    core = core_of(Info(), admission="predicted_peak")
    lengths = [listener._lengths for listener in core.listeners if hasattr(listener, "_lengths")]
    before = [each.num_seen for each in lengths]
    for number in range(3):
        assert core.add_request(pooled(number, [1, 2, 3])) is None
    while core.has_work:
        message = core.step()
        assert message.num_tokens == 0
    assert [each.num_seen for each in lengths] == before and lengths
    assert core.add_request(AddRequest(9, [1], void_params())) is None
    results(core)
    assert [each.num_seen for each in lengths] != before


def test_a_chat_does_not_wait_for_the_texts_of_another_request_and_they_do_not_starve() -> None:
    core = core_of(Info(num_blocks=64), max_num_seqs=2, short_prompt_share=0, enable_prefix_caching=False)
    for number in range(100):
        assert core.add_request(pooled(number, [1, 2, number % 4])) is None
    core.step()
    ended = []
    for number in range(1000, 1040):  # as many chats as vectors from here on, and always one that waits
        add(core, number, [3, 4], max_tokens=1)
    while core.has_work:
        ended += [delta.request_id for delta in core.step().deltas if delta.finish_reason is not None]
        check_core(core)
    assert next(place for place, number in enumerate(ended) if number >= 1000) <= 2
    chats = [place for place, number in enumerate(ended) if number >= 1000]
    assert ended.index(1039) == chats[-1] and 78 <= chats[-1] <= 82, "one of each in turn"
    assert [number for number in ended if number < 1000] == list(range(2, 100)), "each line in the order of arrival"


@given(st.lists(st.sampled_from(["text", "vector", "admit", "abort"]), max_size=40))
def test_two_lines_take_turns(events: list[str]) -> None:
    order, lines, turn = VectorsBeside(), {"text": list[Request](), "vector": list[Request]()}, "text"
    for number, event in enumerate(events):
        if event in lines:
            attached = Attached(pooling=Pooling("embed")) if event == "vector" else None
            request = Request(number, [1], void_params(), attached=attached)
            before = order.ahead(request)
            order.add(request)
            lines[event].append(request)
            waiting = order.next_requests(100)
            assert {one.request_id for one in before} == {one.request_id for one in waiting[: waiting.index(request)]}
        elif waiting := order.next_requests(100):
            request = waiting[-1] if event == "abort" else waiting[0]
            mine = next(name for name, line in lines.items() if request in line)
            lines[mine].remove(request)
            order.remove(request)
            if event == "admit":
                other = "vector" if mine == "text" else "text"
                assert mine == turn or not lines[turn], "the other line had its turn"
                order.admitted(request, 0)
                turn = other
        assert len(order) == sum(map(len, lines.values()))
        for line in lines.values():
            assert [request for request in order.next_requests(100) if request in line] == line
        assert all(request in order for line in lines.values() for request in line)
