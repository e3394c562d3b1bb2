from __future__ import annotations

import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer, make_request, step_message
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.adapter import AdapterRef
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import AddRequest
from inflight.frontend.errors import RequestError
from inflight.frontend.output import inbox, output_processor
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.output.pacing import Pacing
from inflight.frontend.output.request_state import RequestState
from inflight.frontend.request.resume import SequenceEnd

TOKENIZER = demo_tokenizer()
STATS = StepStats(1, 0, 0, 1, 9, 0, 0, 1, 1, 1, 0.001)
TEXT = " the list of names"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
PROMPT = TOKENIZER.encode("Return")


class EngineStub:
    """Records the calls of the streams; the test plays the engine."""

    def __init__(self) -> None:
        self.submitted: dict[int, AddRequest] = {}
        self.aborted: list[tuple[int, int | None]] = []
        self.released: list[int] = []
        self.resubmitted: list[AddRequest] = []
        self.holds_new = False
        self.refuse: RequestError | None = None

    def submit(self, request: AddRequest) -> None:
        if self.refuse:
            raise self.refuse
        self.submitted[request.request_id] = request

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def resubmit(self, requests: Iterable[AddRequest], hold_new: bool = False, settled: bool = True) -> None:
        self.resubmitted += requests
        self.holds_new = hold_new

    def recall(self, emptied: Callable[[], None]) -> set[int]:
        raise NotImplementedError

    def release(self, request_id: int) -> None:
        self.released.append(request_id)

    def ask(self, question: Any) -> Future[Any]:
        raise NotImplementedError


class Rig:
    def __init__(self, **options: Any) -> None:
        self.engine = EngineStub()
        self.stats = RecordingStats()
        self.errors: list[str] = []
        self.lines: list[str] = []
        options |= {"log_info": self.lines.append}
        options.setdefault("check_seconds", 0.01)
        self.streams = OutputProcessor(TOKENIZER, self.engine, self.stats, self.errors.append, **options)
        self.streams.start()

    def open(self, *returns: str, stream: bool = True, **options: Any) -> RecordingClient:
        client = RecordingClient()
        prepend_text = "" if stream else "Return"
        request = make_request(PROMPT, returns=returns, stream=stream, prepend_text=prepend_text, **options)
        self.streams.open(request, client)
        return client

    def step(self, *deltas: SequenceDelta, failed: Sequence[RequestFailed] = ()) -> None:
        self.streams.on_step(step_message(deltas, STATS, failed=list(failed)))

    def settle(self) -> None:
        """Wait until the sender has handled all that came so far."""
        handled = threading.Event()
        self.streams._events.put(self.streams._catch_up)
        self.streams._events.put(handled.set)
        assert handled.wait(10)

    def feed(self, ids: list[int], finish: str | None = "length", request_id: int = 1) -> None:
        for position, token in enumerate(ids):
            last = position == len(ids) - 1
            self.step(SequenceDelta(request_id, 0, [token], finish if last else None))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.stop("test over")


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


def test_streaming_text_and_one_final(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_num_output_tokens", "return_num_input_tokens")
    rig.feed(IDS)
    client.wait()
    assert client.texts() == [TEXT]
    reasons = [response["finish_reason"][0] for response in client.responses]
    assert reasons == [b"None"] * (len(reasons) - 1) + [b"length"]
    assert sum(int(response["num_output_tokens"][0]) for response in client.responses) == len(IDS)
    assert all(response["num_input_tokens"].tolist() == [len(PROMPT)] for response in client.responses)
    assert rig.engine.released == [1]
    assert rig.engine.aborted == []
    wait_for(lambda: rig.stats.streams)
    assert len(rig.stats.first_tokens) == 1
    assert rig.stats.num_tokens == len(IDS)


def test_with_an_interval_responses_after_the_first_wait_for_more_tokens() -> None:
    rig = Rig(interval=3)
    client = rig.open("return_num_output_tokens", max_tokens=40)
    ids = TOKENIZER.encode(4 * TEXT, add_special_tokens=False)
    for position, token in enumerate(ids):
        rig.step(SequenceDelta(1, 0, [token], "length" if position == len(ids) - 1 else None))
        rig.settle()  # else the sender coalesces them itself
    client.wait()
    rig.streams.stop("test over")
    first, *more, _ = [int(response["num_output_tokens"][0]) for response in client.responses]
    assert first < 3, "the first text is not held back"
    assert more and all(count >= 3 for count in more)
    assert client.texts() == [4 * TEXT]


def test_without_streaming_there_is_one_response_with_the_prompt(rig: Rig) -> None:
    client = rig.open("return_token_ids", stream=False)
    rig.feed(IDS)
    client.wait()
    assert len(client.responses) == 1
    assert client.texts() == ["Return" + TEXT]
    assert client.responses[0]["token_ids"].tolist() == IDS
    assert client.responses[0]["token_counts"].tolist() == [len(IDS)]


def test_a_stream_that_falls_behind_gets_its_text_in_one_response(rig: Rig) -> None:
    gate = threading.Event()
    client = rig.open("return_token_ids")
    rig.streams._events.put(lambda: gate.wait(10) and None)
    rig.feed(IDS)
    gate.set()
    client.wait()
    assert len(client.responses) == 1
    assert client.texts() == [TEXT]
    assert client.responses[0]["token_ids"].tolist() == IDS


def test_tokens_without_text_cause_no_response(rig: Rig) -> None:
    ids = TOKENIZER.encode("😀", add_special_tokens=False)
    client = rig.open()
    rig.feed(ids, finish=None)
    assert client.arrived.wait(20)
    rig.feed([IDS[0]])
    client.wait()
    assert client.responses[0]["text_output"][0].decode().endswith("😀")


def test_a_stop_string_ends_the_stream_and_aborts_the_sequence(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_stop_reason", "return_token_ids", stop=["st of"], stream=True)
    rig.feed(IDS, finish=None)
    client.wait()
    assert client.texts() == [" the li"]
    assert client.responses[-1]["stop_reason"].tolist() == [b'"st of"']
    assert client.responses[-1]["finish_reason"].tolist() == [b"stop"]
    assert rig.engine.aborted == [(1, 0)]
    sent = [token for response in client.responses for token in response["token_ids"].tolist()]
    assert TOKENIZER.decode(sent).startswith(" the list of")
    assert len(sent) < len(IDS)  # the tokens behind the match are not counted
    rig.feed(IDS)  # late deltas
    rig.open()
    assert not rig.errors


def test_a_stop_string_in_the_last_token_needs_no_abort(rig: Rig) -> None:
    client = rig.open("return_finish_reason", stop=["names"], include_stop_str_in_output=True)
    rig.feed(IDS, finish="length")
    client.wait()
    assert client.texts() == [TEXT]
    assert client.responses[-1]["finish_reason"].tolist() == [b"stop"]
    assert rig.engine.aborted == []


def test_stop_strings_wait_for_min_tokens(rig: Rig) -> None:
    client = rig.open(stop=[" the", "names"], min_tokens=2)
    rig.feed(IDS, finish="length")
    assert client.wait().texts() == [" the list of "]


def test_a_stop_token_counts_but_is_not_shown(rig: Rig) -> None:
    for include in (False, True):
        client = rig.open("return_token_ids", include_stop_str_in_output=include)
        request_id = 1 + include
        rig.step(SequenceDelta(request_id, 0, [IDS[0]]))
        rig.step(SequenceDelta(request_id, 0, [IDS[1]], "stop", IDS[1]))
        client.wait()
        assert client.texts() == [TOKENIZER.decode(IDS[: 1 + include])]
        assert sum(response["token_counts"].sum() for response in client.responses) == 2


def test_text_held_back_comes_at_the_end(rig: Rig) -> None:
    client = rig.open(stop=["names of"])
    rig.feed(IDS)
    assert client.wait().texts() == [TEXT]


def test_every_response_has_all_n_sequences(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_token_ids", n=2)
    rig.step(SequenceDelta(1, 0, [IDS[0]]), SequenceDelta(1, 1, [IDS[1]]))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "stop"), SequenceDelta(1, 1, [IDS[2]]))
    rig.step(SequenceDelta(1, 1, [IDS[3]], "length"))
    client.wait()
    assert client.texts() == [TOKENIZER.decode(IDS[:2]), TOKENIZER.decode(IDS[1:4])]
    last = client.responses[-1]
    assert last["finish_reason"].tolist() == [b"stop", b"length"]
    for response in client.responses:
        assert int(response["token_counts"].sum()) == len(response["token_ids"])


@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_those_of_the_prompt_when_it_first_ran(rig: Rig, stream: bool) -> None:
    """The other sequences find the first one's prompt, and so does the next engine after a crash."""
    client = rig.open("return_num_cached_tokens", n=2, stream=stream)
    rig.step(SequenceDelta(1, 0, [IDS[0]], num_cached_tokens=3))
    rig.step(SequenceDelta(1, 1, [IDS[0]], num_cached_tokens=8))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "length", num_cached_tokens=9))
    rig.step(SequenceDelta(1, 1, [IDS[1]], "length"))
    client.wait()
    assert {tuple(response["num_cached_tokens"].tolist()) for response in client.responses} == {(3,)}
    assert all(response["num_cached_tokens"].dtype == "uint32" for response in client.responses)


def test_cached_tokens_are_zero_where_no_engine_ran_the_request(rig: Rig) -> None:
    fields = {"output_token_ids": [IDS]}
    client = rig.open("return_num_cached_tokens", fields=fields, ends=[("length", None)], max_tokens=len(IDS))
    assert client.wait().responses[-1]["num_cached_tokens"].tolist() == [0]


def joined(client: RecordingClient, index: int) -> str:
    """The text of the responses about one sequence."""
    own = [response for response in client.responses if response["sequence_index"].tolist() == [index]]
    assert all(len(response["text_output"]) == 1 for response in own)
    return "".join(response["text_output"][0].decode() for response in own)


@pytest.mark.parametrize("stream", [True, False])
def test_separate_responses_are_about_one_sequence_each(rig: Rig, stream: bool) -> None:
    client = rig.open("return_finish_reason", "return_token_ids", n=2, separate=True, stream=stream)
    rig.step(SequenceDelta(1, 1, IDS[:2]))
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    rig.settle()
    assert client.finals == 0
    rig.step(SequenceDelta(1, 1, IDS[2:], "stop", IDS[-1]))
    client.wait()
    prompt = "" if stream else "Return"
    assert joined(client, 0) == prompt + TEXT
    assert joined(client, 1) == prompt + TOKENIZER.decode(IDS[:-1])
    ends = {int(r["sequence_index"][0]): r["finish_reason"].tolist() for r in client.responses}
    assert ends == {0: [b"length"], 1: [b"stop"]}
    assert sum(len(response["token_ids"]) for response in client.responses) == 2 * len(IDS)
    if not stream:
        assert [int(response["sequence_index"][0]) for response in client.responses] == [0, 1]


def test_the_end_of_each_sequence_is_told_once(rig: Rig) -> None:
    client = rig.open("return_finish_reason", n=3, separate=True)
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    rig.settle()  # sent: it had text
    rig.step(SequenceDelta(1, 1, [], "stop"))
    rig.settle()  # not sent: nothing to show
    rig.step(SequenceDelta(1, 2, IDS[:1], "length"))
    client.wait()
    ends = [(int(r["sequence_index"][0]), r["finish_reason"][0]) for r in client.responses]
    assert ends == [(0, b"length"), (1, b"stop"), (2, b"length")]


def test_the_chosen_tokens_log_probabilities_as_tensorrt_llm_sends_them(rig: Rig) -> None:
    client = rig.open("return_log_probs", n=2, logprobs=0, stream=False)
    for index, count in ((0, 3), (1, 2)):
        entries = [[(token, -1.0 - k, 1)] for k, token in enumerate(IDS[:count])]
        rig.step(SequenceDelta(1, index, IDS[:count], "length", None, Logprobs.of(entries)))
    (response,) = client.wait().responses
    assert response["cum_log_probs"].tolist() == [-6.0, -3.0]
    assert response["output_log_probs"].tolist() == [[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]]
    assert "logprobs" not in response


def test_cumulative_responses_repeat_what_came_before(rig: Rig) -> None:
    client = rig.open("return_token_ids", "return_num_output_tokens", "return_logprobs", logprobs=0, cumulative=True)
    for position, token in enumerate(IDS):
        last = position == len(IDS) - 1
        rig.step(SequenceDelta(1, 0, [token], "length" if last else None, None, Logprobs.of([[(token, -1.0, 1)]])))
        rig.settle()
    client.wait()
    for response in client.responses:
        ids = response["token_ids"].tolist()
        assert ids == IDS[: len(ids)]
        assert response["num_output_tokens"].tolist() == response["token_counts"].tolist() == [len(ids)]
        assert TEXT.startswith(response["text_output"][0].decode())
        assert [list(map(int, row)) for row in json.loads(response["logprobs"][0])] == [[token] for token in ids]
    assert client.responses[-1]["text_output"][0].decode() == TEXT
    assert len(client.responses) > 1


def test_cumulative_responses_include_the_output_that_a_request_begins_with(rig: Rig) -> None:
    client = rig.open("return_token_ids", cumulative=True, fields={"output_token_ids": [IDS[:3]]})
    rig.step(SequenceDelta(1, 0, IDS[3:], "length"))
    (response,) = client.wait().responses
    assert (response["text_output"][0].decode(), response["token_ids"].tolist()) == (TEXT, IDS)


def test_without_detokenization_there_are_tokens_and_no_text(rig: Rig) -> None:
    client = rig.open("return_logprobs", "return_num_output_tokens", logprobs=0, detokenize=False)
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, Logprobs.of([[(IDS[0], -1.0, 1)]])))
    assert client.arrived.wait(20), "a token is worth a response"
    rig.step(SequenceDelta(1, 0, IDS[1:], "length", None, Logprobs.of([(token, -1.0, 1)] for token in IDS[1:])))
    client.wait()
    assert client.texts() == [""]
    assert sum(int(response["num_output_tokens"][0]) for response in client.responses) == len(IDS)
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert rows[0] == {str(IDS[0]): {"logprob": -1.0, "rank": 1, "decoded_token": None}}


def test_logprobs_have_vllm_backends_format(rig: Rig) -> None:
    client = rig.open("return_logprobs", "return_cumulative_logprob", logprobs=1)
    entry = [(IDS[0], -1.5, 2), (7, -0.25, 1)]
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, Logprobs.of([entry])))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "length", None, Logprobs.of([[(IDS[1], float("-inf"), 1)]])))
    client.wait()
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert rows[0] == {
        str(IDS[0]): {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.token_text(IDS[0])},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": TOKENIZER.token_text(7)},
    }
    assert rows[1][str(IDS[1])]["logprob"] == -9999.0
    assert client.responses[0]["cumulative_logprob"].tolist() in ([-1.5], [float("-inf")])


def test_logprobs_are_null_unless_requested(rig: Rig) -> None:
    client = rig.open("return_logprobs")
    rig.feed(IDS)
    assert {response["logprobs"][0] for response in client.wait().responses} == {b"null"}


def test_prompt_logprobs_come_complete_with_the_first_response_only(rig: Rig) -> None:
    client = rig.open("return_prompt_logprobs", prompt_logprobs=0)
    rest = [[(token, -1.0, 1)] for token in PROMPT[1:]]
    rig.step(SequenceDelta(1, 0, [], None, None, None, Logprobs([0])))
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, None, Logprobs.of(rest)))
    assert client.arrived.wait(20)
    rig.feed(IDS[1:])
    client.wait()
    first, *others = client.responses
    rows = json.loads(first["prompt_logprobs"][0])
    assert [None if row is None else list(row) for row in rows] == [None, *([str(t)] for t in PROMPT[1:])]
    assert others
    assert not any("prompt_logprobs" in response for response in others)


def test_a_cancelled_stream_is_aborted_at_once_and_ends_with_cancelled(rig: Rig) -> None:
    client = rig.open()
    rig.feed(IDS[:1], finish=None)
    client.cancelled = True
    client.wait()
    assert client.error == ("CANCELLED", "Request was cancelled")
    assert (1, None) in rig.engine.aborted
    rig.feed(IDS)  # late
    time.sleep(0.05)
    assert client.finals == 1
    while len(rig.lines) < 2:
        time.sleep(0.001)
    assert rig.lines == [
        "Cancelling the request 1 after 1 output tokens: Request was cancelled",
        "Successfully cancelled the request 1",
    ]


def test_the_line_about_a_cancelled_request_has_the_clients_name_for_it(rig: Rig) -> None:
    client = rig.open(name="poem\n7")
    client.cancelled = True
    client.wait()
    rig.open(name="other")
    rig.feed(IDS, request_id=2)
    rig.settle()
    assert rig.lines[0] == "Cancelling the request 1 'poem\\n7' after 0 output tokens: Request was cancelled"


def test_a_request_that_ended_before_its_cancellation_was_seen_is_not_logged(rig: Rig) -> None:
    client = rig.open()
    rig.feed(IDS)
    client.wait()
    stream = RequestState(make_request(PROMPT), client, TOKENIZER, 1)
    stream.closed = True
    rig.streams._cancel(stream, RequestError("CANCELLED", "Request was cancelled"), "cancelled")
    assert rig.lines == []


def test_a_deadline_ends_a_stream_after_its_tokens_so_far_were_sent(rig: Rig) -> None:
    client = rig.open(timeout=0.2)
    rig.feed(IDS[:2], finish=None)
    client.wait()
    assert client.error is not None
    code, message = client.error
    assert code == "CANCELLED"
    assert message == "deadline exceeded: the request's timeout of 0.2 s ran out after 2 output tokens"
    assert client.texts() == [TOKENIZER.decode(IDS[:2])]
    assert (1, None) in rig.engine.aborted


def test_a_deadline_does_not_wait_for_the_next_sweep() -> None:
    rig = Rig(check_seconds=30.0)
    try:
        client = rig.open(timeout=0.05)
        assert client.ended.wait(20)
    finally:
        rig.streams.stop("test over")


def test_the_engines_refusal_ends_its_stream_and_its_death_none(rig: Rig) -> None:
    one, two, three = rig.open(), rig.open(max_tokens=len(IDS)), rig.open()
    rig.streams.on_request_failed(RequestFailed(1, "UNAVAILABLE", "full"))
    rig.step(SequenceDelta(2, 0, [IDS[0]]))
    rig.streams.on_engine_down([2], {}, "signal 9")
    assert one.wait().error == ("UNAVAILABLE", "full")
    rig.settle()
    (again,) = rig.engine.resubmitted
    assert (again.request_id, again.output_token_ids, again.replayed) == (2, [IDS[:1]], True)
    rig.feed(IDS[1:], request_id=2)
    assert two.wait().texts() == [TEXT]
    rig.feed(IDS, request_id=3)
    assert three.wait().texts() == [TEXT]


def test_how_each_request_ended_is_counted_before_its_client_hears_of_it() -> None:
    rig = Rig(max_sequences=9, max_replays=0)
    unsettled: list[int] = []

    class Client(RecordingClient):
        def send(self, outputs: dict[str, Any], final: bool) -> None:
            if final:
                unsettled.append(rig.stats.unsettled)
            super().send(outputs, final)

        def fail(self, code: str, message: str) -> None:
            unsettled.append(rig.stats.unsettled)
            super().fail(code, message)

    def open_one(**options: Any) -> Client:
        client = Client()
        rig.streams.open(make_request(PROMPT, **options), client)
        return client

    done, refused, given_up, died, cancelled = (open_one() for _ in range(5))
    late = open_one(timeout=0.01)
    invalid, beyond, lost = Client(), open_one(n=5), open_one()
    rig.streams.reject(invalid, RequestError("INVALID_ARG", "no"))
    rig.streams.on_request_failed(RequestFailed(2, "UNAVAILABLE", "full"))
    rig.step(failed=[RequestFailed(3, "INTERNAL", "NaN")])
    rig.streams.on_engine_down([4], {}, "signal 9")
    cancelled.cancelled = True
    for client in (refused, given_up, died, cancelled, late, invalid, beyond):
        client.wait()
    rig.feed(IDS)
    done.wait()
    lost.broken = True
    rig.feed(IDS, request_id=7)
    lost.wait()
    rig.streams.stop("test over")
    assert died.error == (
        "INTERNAL",
        "the engine process died while it ran this request (signal 9); it is not replayed again (max_replays=0)",
    )
    counted = ["cancelled", "failed", "invalid", "poison", "refused", "refused", "timeout"]
    assert sorted(rig.stats.endings) == counted
    assert len(rig.stats.streams) == 2, "also the one whose last response was lost, and only once"
    assert len(unsettled) == 10
    assert set(unsettled) == {0}


def test_metrics_that_cannot_be_published_hold_up_no_answer(rig: Rig) -> None:
    rig.stats.settle = lambda: 1 / 0  # type: ignore[method-assign]
    client = rig.open()
    rig.feed(IDS)
    assert client.wait().texts() == [TEXT]
    assert any("cannot publish metrics" in line for line in rig.errors)


def test_a_refusal_by_the_supervisor_ends_the_stream(rig: Rig) -> None:
    rig.engine.refuse = RequestError("UNAVAILABLE", "down")
    assert rig.open().wait().error == ("UNAVAILABLE", "down")


def test_requests_beyond_the_capacity_are_refused_until_there_is_room() -> None:
    rig = Rig(max_sequences=3)
    try:
        first = rig.open(n=2)
        refused = rig.open(n=2).wait()
        assert refused.error is not None
        assert refused.error[0] == "UNAVAILABLE"
        assert "2 sequences are open and 3 are allowed" in refused.error[1]
        third = rig.open(n=1)
        rig.step(SequenceDelta(1, 0, [5], "length"), SequenceDelta(1, 1, [5], "length"))
        first.wait()
        wait_for(lambda: rig.streams.num_open_sequences == 1)
        rig.open(n=2)
        rig.feed(IDS, request_id=2)
        third.wait()
        assert third.error is None
    finally:
        rig.streams.stop("test over")


def test_a_request_that_can_never_be_opened_is_invalid() -> None:
    rig = Rig(max_sequences=3)
    try:
        assert rig.open(n=4).wait().error == (
            "INVALID_ARG",
            "n=4 is more than the 3 sequences that may be open at once",
        )
    finally:
        rig.streams.stop("test over")


def test_an_unreachable_client_affects_no_other_stream(rig: Rig) -> None:
    broken, fine = rig.open(), rig.open()
    broken.broken = True
    rig.step(SequenceDelta(1, 0, [IDS[0]]), SequenceDelta(2, 0, [IDS[0]]))
    rig.feed(IDS[1:], request_id=2)
    assert fine.wait().texts() == [TEXT]
    assert broken.wait().error is not None
    assert (1, None) in rig.engine.aborted
    assert rig.errors


class Panic(BaseException):
    """Like a Rust panic in the tokenizers library, not an `Exception`."""


def test_a_tokenizer_panic_affects_no_other_stream(rig: Rig) -> None:
    broken, fine = rig.open(), rig.open()
    rig.step(SequenceDelta(1, 0, IDS[:1]), SequenceDelta(2, 0, IDS[:1]))
    assert fine.arrived.wait(10)

    def panic(*_: Any) -> None:
        raise Panic("index out of bounds")

    rig.streams._streams[1].sequences[0].advance = panic  # type: ignore[method-assign]
    rig.feed(IDS[1:], request_id=1)
    assert broken.wait().error == ("INTERNAL", "Panic: index out of bounds")
    rig.feed(IDS[1:], request_id=2)
    assert fine.wait().texts() == [TEXT]


def test_a_stream_whose_creation_fails_takes_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_sequences=1)
    with monkeypatch.context() as broken:
        broken.setattr("inflight.frontend.output.output_processor.RequestState", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                rig.open()
    client = rig.open()
    rig.feed(IDS, request_id=4)
    assert client.wait().error is None
    rig.streams.stop("over")


def test_a_request_that_the_engine_fails_ends_with_the_error_after_its_tokens(rig: Rig) -> None:
    given_up, other = rig.open("return_token_ids"), rig.open()
    failed = [RequestFailed(1, "UNAVAILABLE", "the adapter was not loaded in time; try again later")]
    rig.step(SequenceDelta(1, 0, IDS[:1]), SequenceDelta(2, 0, IDS[:1]), failed=failed)
    assert given_up.wait().error == ("UNAVAILABLE", "the adapter was not loaded in time; try again later")
    assert [response["token_ids"].tolist() for response in given_up.responses] == [IDS[:1]]
    assert (1, None) in rig.engine.aborted
    rig.feed(IDS[1:], request_id=2)
    assert other.wait().texts() == [TEXT]


def test_a_run_of_tokens_counts_as_one_step(rig: Rig) -> None:
    """Accepted drafts come as several tokens at once: a response for the run, one first token, logprobs for each."""
    client = rig.open("return_token_ids", "return_logprobs", "return_cumulative_logprob", logprobs=0)
    for run, finish in ((IDS[:3], None), (IDS[3:], "length")):
        rig.step(SequenceDelta(1, 0, run, finish, None, Logprobs.of([(token, -0.5, 1)] for token in run)))
    client.wait()
    assert client.texts() == [TEXT]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert [list(row) for row in rows] == [[str(token)] for token in IDS]
    assert client.responses[-1]["cumulative_logprob"].tolist() == [-0.5 * len(IDS)]
    wait_for(lambda: rig.stats.streams)
    assert len(rig.stats.first_tokens) == 1
    assert rig.stats.num_tokens == len(IDS)


def test_a_stop_string_inside_a_run_cuts_its_tokens_and_logprobs(rig: Rig) -> None:
    wanted = ("return_token_ids", "return_logprobs", "return_cumulative_logprob")
    client = rig.open(*wanted, stop=["st of"], logprobs=0)
    rig.step(SequenceDelta(1, 0, IDS, None, None, Logprobs.of([(token, -0.5, 1)] for token in IDS)))
    (response,) = client.wait().responses
    assert client.texts() == [" the li"]
    kept = response["token_ids"].tolist()
    assert kept == IDS[: len(kept)] and TOKENIZER.decode(kept).startswith(" the list of") and len(kept) < len(IDS)
    assert len(json.loads(response["logprobs"][0])) == len(kept)
    assert response["cumulative_logprob"].tolist() == [-0.5 * len(kept)]
    assert rig.engine.aborted == [(1, 0)]


def test_an_interval_counts_tokens_of_runs() -> None:
    rig = Rig(interval=4)
    client = rig.open("return_num_output_tokens", max_tokens=40)
    for run in (1, 3, 2, 2):
        rig.step(SequenceDelta(1, 0, (4 * IDS)[:run]))
        rig.settle()
    rig.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    rig.streams.stop("test over")
    assert [int(response["num_output_tokens"][0]) for response in client.responses] == [1, 5, 2]


def test_a_stream_that_begins_with_output_sends_only_what_comes_after_it(rig: Rig) -> None:
    given = {"output_token_ids": [IDS[:3], None]}
    wanted = ("return_token_ids", "return_cumulative_logprob", "return_finish_reason", "return_num_output_tokens")
    client = rig.open(*wanted, n=2, logprobs=0, fields=given, cumulative_logprobs=[-7.0, -2.0])
    assert rig.engine.submitted[1].output_token_ids == [IDS[:3], None]
    rig.step(SequenceDelta(1, 0, [IDS[3]], None, None, Logprobs.of([[(IDS[3], -1.0, 1)]])))
    rig.settle()
    assert len(rig.stats.first_tokens) == 1
    rig.step(SequenceDelta(1, 0, IDS[4:], "length", None, Logprobs.of([(token, -1.0, 1)] for token in IDS[4:])))
    client.wait()
    assert client.texts() == [TEXT.removeprefix(TOKENIZER.decode(IDS[:3])), ""]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[3:]
    last = client.responses[-1]
    assert last["cumulative_logprob"].tolist() == [-7.0 - len(IDS[3:]), -2.0]
    assert last["finish_reason"].tolist() == [b"length", b"None"], "the other one ended elsewhere"
    wait_for(lambda: rig.stats.streams)
    assert rig.stats.streams[0].num_output_tokens == len(IDS[3:])


def test_a_complete_output_ends_at_once_without_the_engine(rig: Rig) -> None:
    wanted = ("return_token_ids", "return_finish_reason", "return_num_output_tokens")
    client = rig.open(*wanted, stop=["st of"], fields={"output_token_ids": [IDS]})
    (response,) = client.wait().responses
    assert (client.texts(), response["token_ids"].tolist()) == ([""], [])
    assert (response["finish_reason"].tolist(), response["num_output_tokens"].tolist()) == ([b"stop"], [0])
    assert (rig.engine.submitted, rig.engine.aborted) == ({}, [])
    wait_for(lambda: not rig.streams.num_open_sequences)
    assert [stream.num_output_tokens for stream in rig.stats.streams] == [0]


@pytest.mark.parametrize("separate", [False, True])
def test_the_engine_goes_on_with_the_sequences_that_have_not_ended(rig: Rig, separate: bool) -> None:
    """One ended by its stop string, one by its length, one elsewhere; each end is told once, the last never."""
    given = [IDS, IDS[:2], IDS[:2], None]
    ends = [None, None, SequenceEnd("length"), None]
    options = {"n": 4, "stop": ["st of"], "separate": separate, "ends": ends}
    client = rig.open("return_finish_reason", "return_token_ids", fields={"output_token_ids": given}, **options)
    assert rig.engine.submitted[1].output_token_ids == [None, IDS[:2], None, None]
    rig.step(SequenceDelta(1, 1, [5], "length"))
    responses = client.wait().responses
    assert [token for response in responses for token in response["token_ids"].tolist()] == [5]
    if separate:
        told = {int(r["sequence_index"][0]): r["finish_reason"][0] for r in responses}
        assert (len(responses), told) == (3, {0: b"stop", 1: b"length", 2: b"length"})
    else:
        assert responses[-1]["finish_reason"].tolist() == [b"stop", b"length", b"length", b"None"]


class Slow(Pacing):
    """As if sending were costly: a response of each stream every 50 ms."""

    def __init__(self) -> None:
        super().__init__(1)
        self.wait = 0.05

    def step(self, num_streams: int) -> None: ...


@pytest.fixture
def paced() -> Iterator[Rig]:
    rig = Rig(pacing=Slow())
    yield rig
    rig.streams.stop("test over")


def counts(client: RecordingClient) -> list[int]:
    return [int(response["num_output_tokens"][0]) for response in client.responses]


def test_first_tokens_and_ends_never_wait(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    assert counts(client) == [1]
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
        paced.settle()
    assert counts(client) == [1], "held"
    paced.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    assert counts(client) == [1, len(IDS) - 1]
    assert client.texts() == [TEXT]


def test_held_output_is_sent_when_due_even_if_no_token_follows(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens")
    for token in IDS[:3]:
        paced.step(SequenceDelta(1, 0, [token]))
        paced.settle()
    wait_for(lambda: sum(counts(client)) == 3)
    assert client.finals == 0


def test_eight_tokens_are_sent_at_once(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens", max_tokens=100)
    tokens = itertools.cycle(IDS)
    paced.step(SequenceDelta(1, 0, [next(tokens)]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for _ in range(20):
        paced.step(SequenceDelta(1, 0, [next(tokens)]))
        paced.settle()
    assert counts(client) == [1, 8, 8]


def test_what_is_held_is_sent_before_all_streams_are_ended(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    paced.step(SequenceDelta(1, 0, IDS[1:2]))
    paced.settle()
    paced.step(SequenceDelta(1, 0, IDS[2:3]))
    paced.streams.end_all(RequestError("UNAVAILABLE", "draining"))
    assert client.wait().error == ("UNAVAILABLE", "draining")
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[:3]


def test_a_stop_string_is_found_at_once_while_responses_wait(paced: Rig) -> None:
    client = paced.open(stop=["st of"])
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
    assert client.wait().texts() == [" the li"]
    assert paced.engine.aborted == [(1, 0)]


def test_an_error_comes_behind_what_is_held(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    paced.step(SequenceDelta(1, 0, IDS[1:3]))
    paced.settle()
    client.cancelled = True
    client.wait()
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[:3]


@pytest.mark.parametrize("end", ["its last token", "an error"])
def test_a_costly_stream_does_not_hold_the_others(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_TOKENS", 1)
    rig = Rig()
    costly, cheap = rig.open("return_token_ids", max_tokens=100), rig.open()
    rig.settle()
    sequence = rig.streams._streams[1].sequences[0]
    advance_each = sequence.advance_each

    def slow(token_ids: list[int]) -> None:
        time.sleep(0.01)  # more than a slice
        advance_each(token_ids)

    sequence.advance_each = slow  # type: ignore[method-assign]
    rig.feed(4 * IDS, finish="length" if end == "its last token" else None)
    rig.feed(IDS, request_id=2)
    if end == "an error":
        rig.streams._fail_behind(1, RequestError("INTERNAL", "NaN"), "failed")
    assert cheap.wait().texts() == [TEXT]
    assert not costly.finals
    costly.wait()
    sent = [token for response in costly.responses for token in response["token_ids"].tolist()]
    assert sent == 4 * IDS
    assert costly.texts() == [TOKENIZER.decode([*PROMPT, *4 * IDS]).removeprefix(TOKENIZER.decode(PROMPT))]
    assert (costly.error is None) == (end == "its last token")
    rig.streams.stop("test over")


def test_stop_fails_what_is_open() -> None:
    rig = Rig()
    client = rig.open()
    rig.streams.stop("the model is being unloaded")
    assert client.error == ("UNAVAILABLE", "the model is being unloaded")
    assert client.finals == 1


moves = st.lists(
    st.tuples(st.sampled_from(["token", "finish", "cancel", "down", "fail", "late"]), st.integers(1, 5)), max_size=40
)


@settings(max_examples=25, deadline=None)
@given(moves=moves, stream=st.booleans(), stop=st.booleans(), paced=st.booleans())
def test_every_stream_ends_exactly_once(moves: list[tuple[str, int]], stream: bool, stop: bool, paced: bool) -> None:
    """Invariants 4 and 6 under random events; `Client` fails on anything after FINAL."""
    rig = Rig(check_seconds=0.001, pacing=Slow() if paced else None)
    try:
        clients = {k: rig.open(stream=stream, stop=["st of"] if stop else []) for k in range(1, 6)}
        fed: dict[int, list[int]] = {k: [] for k in clients}
        for move, k in moves:
            token = IDS[len(fed[k]) % len(IDS)]
            if move in ("token", "finish"):
                fed[k].append(token)
                rig.step(SequenceDelta(k, 0, [token], "length" if move == "finish" else None))
            elif move == "cancel":
                clients[k].cancelled = True
            elif move == "down":
                rig.streams.on_engine_down([k], {}, "signal 9")
            elif move == "fail":
                rig.streams.on_request_failed(RequestFailed(k, "INTERNAL", "failed"))
            else:
                rig.step(SequenceDelta(99, 0, [token]))
    finally:
        rig.streams.stop("over")
    for k, client in clients.items():
        assert client.finals == 1
        shown = "".join(client.texts()).removeprefix("" if stream else "Return")
        assert TOKENIZER.decode(fed[k]).startswith(shown)
    assert rig.streams.num_open_sequences == 0
    assert not rig.errors


two_sequences = st.lists(
    st.tuples(st.sampled_from(["token", "finish", "settle", "cancel"]), st.integers(0, 1)), max_size=24
)


@settings(max_examples=40, deadline=None)
@given(moves=two_sequences, stream=st.booleans(), stop=st.booleans(), cumulative=st.booleans(), paced=st.booleans())
def test_separate_and_cumulative_responses_lose_nothing(
    moves: list[tuple[str, int]], stream: bool, stop: bool, cumulative: bool, paced: bool
) -> None:
    """Each of two sequences gets its tokens, in order, and its end at most once, however the steps are cut."""
    rig = Rig(check_seconds=0.001, pacing=Slow() if paced else None)
    fed: list[list[int]] = [[], []]
    ended = [False, False]
    try:
        options = {"n": 2, "separate": True, "cumulative": cumulative, "stop": ["st of"] if stop else []}
        client = rig.open("return_token_ids", "return_finish_reason", stream=stream, **options)
        for move, index in moves:
            if move == "settle":
                rig.settle()
            elif move == "cancel":
                client.cancelled = True
            elif not ended[index]:
                fed[index].append(IDS[len(fed[index]) % len(IDS)])
                ended[index] = move == "finish"
                rig.step(SequenceDelta(1, index, fed[index][-1:], "length" if ended[index] else None))
        rig.settle()
    finally:
        rig.streams.stop("over")
    assert client.finals == 1
    for index in range(2):
        own = [r for r in client.responses if r["sequence_index"].tolist() == [index]]
        parts = [response["token_ids"].tolist() for response in own]
        got = (parts or [[]])[-1] if cumulative else [token for part in parts for token in part]
        assert fed[index][: len(got)] == got
        ends = [response["finish_reason"][0] for response in own if response["finish_reason"][0] != b"None"]
        assert len(ends) <= 1
        if client.error is None:
            assert len(ends) == 1
            assert ends == [b"stop"] or got == fed[index]
    assert not rig.errors


def test_statistics_that_raise_do_not_stop_the_streams(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.open()

    def broken(*_: Any) -> None:
        raise KeyError("a metric")

    monkeypatch.setattr(rig.stats, "step", broken)
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    assert client.wait().error is None
    assert client.texts() == [TEXT]
    assert rig.errors == ["in the sender thread: KeyError: 'a metric'"]


def test_a_request_that_cannot_be_sent_to_the_engine_is_answered_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: AddRequest) -> None:
        raise OverflowError("integers of 65 bits")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", broken)
        client = rig.open()
        assert client.wait().error == ("INTERNAL", "internal error: OverflowError: integers of 65 bits")
    other = rig.open()
    rig.step(SequenceDelta(2, 0, IDS, "length"))
    assert other.wait().error is None
    wait_for(lambda: not rig.streams.num_open)
    assert client.finals == 1


def test_tokens_that_waited_together_are_decoded_once_and_sent_as_if_they_had_not(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    (sequence,) = paced.streams._streams[1].sequences
    joined: list[list[int]] = []
    advance_each = sequence.advance_each
    sequence.advance_each = lambda ids: (joined.append(ids), advance_each(ids))[1]  # type: ignore[method-assign]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
    paced.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    assert joined == [IDS[1:]]
    assert client.texts() == [TEXT]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS


@pytest.mark.parametrize("ending", ["finished", "cancelled", "late", "failed", "refused", "unloaded"])
def test_a_request_lets_go_of_its_adapter_when_it_ends(rig: Rig, ending: str) -> None:
    """Its files leave with the last reference, so none may wait for the collection of a cycle."""

    class Adapter:
        ref = AdapterRef("doll", "0" * 32, "/nowhere", 8)

    adapter: Any = Adapter()
    gone = weakref.ref(adapter)
    request = make_request(PROMPT, timeout=0.001 if ending == "late" else None)
    request.adapter = adapter
    client = RecordingClient(cancelled=ending == "cancelled")
    rig.engine.refuse = RequestError("UNAVAILABLE", "no") if ending == "refused" else None
    gc.collect()
    gc.disable()
    try:
        rig.streams.open(request, client)
        del request, adapter
        if ending == "finished":
            rig.feed(IDS)
        elif ending == "failed":
            rig.streams.on_request_failed(RequestFailed(1, "UNAVAILABLE", "no"))
        elif ending == "unloaded":
            rig.streams.end_all(RequestError("UNAVAILABLE", "unloaded"))
        client.wait()
        rig.settle()
        rig.engine.submitted.clear()
        rig.engine.refuse = None
        wait_for(lambda: rig.settle() or rig.stats.streams or rig.stats.endings)
        rig.stats.streams.clear()
        wait_for(lambda: gone() is None)
    finally:
        gc.enable()


class Postman(RecordingClient):
    """A client whose responses are made at one time and sent at another; `log` has both, of all of them."""

    log: list[tuple[str, int]]
    number: int
    lost = False

    def prepare(self, outputs: dict[str, Any], final: bool) -> Callable[[], None]:
        self.log.append(("made", self.number))
        return super().prepare(outputs, final)

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self.log.append(("sent", self.number))
        if self.lost:
            raise RuntimeError("cannot reach the client")
        super().send(outputs, final)

    def fail(self, code: str, message: str) -> None:
        self.log.append(("failed", self.number))
        super().fail(code, message)


def postmen(rig: Rig, count: int) -> tuple[list[Postman], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    clients = [Postman() for _ in range(count)]
    for number, client in enumerate(clients, 1):
        client.log, client.number = log, number
        rig.streams.open(make_request(PROMPT, returns=["return_token_ids"], max_tokens=40), client)
    rig.settle()
    return clients, log


def test_responses_of_a_step_are_made_in_a_row_and_sent_in_a_row(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "_TURNS_SECONDS", 60.0)
    _, log = postmen(rig, 20)
    rig.step(*[SequenceDelta(number, 0, IDS[:1]) for number in range(1, 21)])
    rig.settle()
    rows = [name for name, _ in itertools.groupby(kind for kind, _ in log)]
    assert rows == ["made", "sent", "made", "sent"], "16 and 4"
    assert [number for kind, number in log if kind == "sent"] == list(range(1, 21))


def test_a_lost_client_among_others_ends_its_stream_alone(rig: Rig) -> None:
    clients, log = postmen(rig, 3)
    clients[1].lost = True
    rig.step(*[SequenceDelta(number, 0, IDS[:1]) for number in (1, 2, 3)])
    rig.settle()
    assert log.count(("sent", 2)) == 1 and log.count(("failed", 2)) == 1
    assert rig.engine.aborted == [(2, None)]
    for number in (1, 3):
        rig.step(*[SequenceDelta(number, 0, [token]) for token in IDS[1:-1]])
        rig.step(SequenceDelta(number, 0, IDS[-1:], "length"))
    assert [client.wait().error is None for client in clients] == [True, False, True]
    assert clients[0].texts() == clients[2].texts() == [TEXT]
    wait_for(lambda: not rig.streams.num_open)


def test_what_was_made_is_sent_before_the_error_that_follows(rig: Rig) -> None:
    (client,), log = postmen(rig, 1)
    rig.step(SequenceDelta(1, 0, IDS[:1]))
    rig.streams._fail_behind(1, RequestError("INTERNAL", "NaN"), "failed")
    assert client.wait().error == ("INTERNAL", "NaN")
    assert log == [("made", 1), ("sent", 1), ("failed", 1)]


def test_a_stream_counts_as_open_until_its_last_response_is_sent(rig: Rig) -> None:
    (client,), _ = postmen(rig, 1)
    open_at_last: list[int] = []
    send = client.send
    client.send = lambda outputs, final: (open_at_last.append(rig.streams.num_open), send(outputs, final))[1]  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    client.wait()
    assert open_at_last == [1]
    wait_for(lambda: not rig.streams.num_open)


def test_a_metric_that_fails_beside_a_lost_client_stops_no_other_response(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, _ = postmen(rig, 3)
    clients[0].lost = True

    def broken(*_: object) -> None:
        raise KeyError("a metric")

    monkeypatch.setattr(rig.stats, "unsuccessful", broken)
    rig.step(*[SequenceDelta(number, 0, IDS, "length") for number in (1, 2, 3)])
    assert clients[1].wait().texts() == clients[2].wait().texts() == [TEXT]


def at_once(rig: Rig, *deltas: SequenceDelta) -> None:
    """These deltas, one a step, have all arrived before a stream gets a turn."""
    gate = threading.Event()
    rig.streams.run(lambda: gate.wait(10) and None)
    for delta in deltas:
        rig.step(delta)
    rig.streams.run(lambda: None)
    gate.set()


class LosesFirst(Postman):
    """Its first response cannot be sent; later ones could."""

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self.lost = not any(kind == "sent" for kind, _ in self.log)
        super().send(outputs, final)


def loses_first(rig: Rig) -> LosesFirst:
    client = LosesFirst()
    client.log, client.number = [], 1
    rig.streams.open(make_request(PROMPT, max_tokens=40), client)
    rig.settle()
    return client


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_of_a_stream_follows_a_response_that_was_lost(
    paced: Rig, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Several turns of it were made by then, or its further output waits to be due."""
    monkeypatch.setattr(inbox, "MOST_TOKENS", 1)
    monkeypatch.setattr(output_processor, "SLICE", 0.0)
    monkeypatch.setattr(output_processor, "_TURNS_SECONDS", 60.0)
    paced.streams._pacing.wait = 1000.0 if waits else 0.0  # type: ignore[union-attr]
    client = loses_first(paced)
    at_once(paced, *[SequenceDelta(1, 0, [token]) for token in IDS[:4]])
    assert client.wait().error == ("INTERNAL", "RuntimeError: cannot reach the client")
    assert client.log == [("made", 1)] * (1 if waits else 4) + [("sent", 1), ("failed", 1)]


def test_a_lost_last_response_is_not_followed_by_an_end_without_its_text(rig: Rig) -> None:
    """Tokens of a step behind the end arrive while the metrics are published."""
    client = loses_first(rig)
    late = step_message([SequenceDelta(1, 0, IDS[:1])], STATS)
    rig.stats.settle = lambda: rig.streams._take(time.monotonic(), late)  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    assert client.wait().error == ("INTERNAL", "RuntimeError: cannot reach the client")
    assert client.log == [("made", 1), ("sent", 1), ("failed", 1)]


def test_what_is_made_does_not_wait_for_the_metrics(rig: Rig) -> None:
    _, log = postmen(rig, 2)
    rig.stats.settle = lambda: log.append(("published", 0))  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"), SequenceDelta(2, 0, IDS[:2]))
    rig.settle()
    assert log == [("made", 2), ("sent", 2), ("published", 0), ("made", 1), ("sent", 1)]


def test_what_is_made_does_not_wait_for_the_log_probabilities_of_a_prompt(rig: Rig) -> None:
    _, log = postmen(rig, 1)
    client = Postman()
    client.log, client.number = log, 2
    rig.streams.open(make_request(PROMPT, returns=["return_prompt_logprobs"], prompt_logprobs=0), client)
    rig.settle()
    rows = Logprobs.of([[(token, -1.0, 1)] for token in PROMPT])
    rig.step(SequenceDelta(1, 0, IDS[:2]), SequenceDelta(2, 0, IDS[:1], None, None, None, rows))
    rig.settle()
    assert log == [("made", 1), ("sent", 1), ("made", 2), ("sent", 2)]


def test_parts_that_are_made_are_sent_though_another_cannot_be(rig: Rig) -> None:
    class Client(RecordingClient):
        def prepare(self, outputs: dict[str, Any], final: bool) -> Callable[[], None]:
            if outputs["sequence_index"].tolist() == [1]:
                raise MemoryError("no shared memory")
            return super().prepare(outputs, final)

    client = Client()
    rig.streams.open(make_request(PROMPT, returns=["return_token_ids"], n=2, separate=True), client)
    rig.step(SequenceDelta(1, 0, IDS, "length"), SequenceDelta(1, 1, IDS, "length"))
    assert client.wait().error == ("INTERNAL", "MemoryError: no shared memory")
    assert [response["token_ids"].tolist() for response in client.responses] == [IDS]
