"""Prompts that one Triton computes and another one continues, in front of scripted clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from handover_pair import IDS, Pair, first, request
from scripted_client import INPUTS, Script, ScriptedClient, text

from inflight_client import (
    AsyncStream,
    InvalidRequestError,
    ServerUnreachableError,
    UnavailableError,
)
from inflight_client.endpoints import Endpoints
from inflight_client.request import GenerationRequest
from inflight_gateway import handover_policy, handover_stream
from inflight_gateway.errors import APIError
from inflight_gateway.handover import HandoverUpstream, with_handover
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream


async def test_the_first_token_comes_from_one_triton_and_the_rest_from_the_other() -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    sampling = {"temperature": 1.0, "max_tokens": 17}
    text, result = await pair.run(**sampling, tenant="t", cache_salt="s", request_priority=3, timeout=50.0)
    assert text == "ABC" == result.text and result.token_ids == [5, 7, 7]
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cached_tokens) == (300, 3, 12)
    [asked], [rest] = pair.prefills[0].requests, pair.decode.requests
    assert asked.resume_token_ids is None and rest.resume_token_ids == [[5]]
    assert asked.sampling == sampling and rest.sampling == {**sampling, "seed": 1234}
    for one in (asked, rest):
        assert (one.tenant, one.cache_salt, one.request_priority) == ("t", "s", 3)
        assert one.timeout is not None and 40 < one.timeout <= 50
    assert pair.prefills[0].streams[0].cancelled.is_set(), "it would go on"
    assert pair.outcomes == ["handed_over"] and len(pair.gaps) == 1


async def test_an_answer_in_one_piece_is_that_of_both() -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    text, result = await pair.run(one_response=True, return_token_ids=False)
    assert text == result.text == "ABC" and result.usage.output_tokens == 3
    assert pair.prefills[0].requests[0].stream and not pair.decode.requests[0].stream
    assert not pair.decode.requests[0].return_token_ids and not pair.gaps


async def test_an_answer_that_ends_with_its_first_token_is_complete() -> None:
    pair = Pair(lambda _: [first(finish="stop")])
    text, result = await pair.run(stop_token_ids=[5])
    assert text == "A" and result.choices[0].finish_reason == "stop"
    assert not pair.decode.requests and pair.outcomes == ["ended"]
    assert not pair.prefills[0].streams[0].cancelled.is_set(), "its end and a cancellation must not race"


@pytest.mark.parametrize("limit", [{"max_tokens": 16}, {}])  # the engine's default is 16
async def test_a_short_answer_is_read_to_its_end_after_its_first_token(limit: dict[str, int]) -> None:
    """Its end comes soon, and a cancellation could race with it; the client does not wait for it."""
    goes_on, ended = asyncio.Event(), asyncio.Event()

    def script() -> Script:
        yield from (first(), goes_on, text("B")[0])
        ended.set()

    pair = Pair(lambda _: script())
    assert (await pair.run(**limit))[0] == "ABC" and pair.outcomes == ["handed_over"]
    [stream] = pair.prefills[0].streams
    assert not stream.cancelled.is_set()
    goes_on.set()
    await ended.wait()
    assert not stream.cancelled.is_set()


@pytest.mark.parametrize("seconds", [0.01, 3600.0])
async def test_a_longer_answer_or_one_that_does_not_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(handover_stream, "_SHORT_SECONDS", seconds)
    pair = Pair(lambda _: [first(), asyncio.Event()])
    await pair.run(max_tokens=16 if seconds < 1 else 17)
    await pair.prefills[0].streams[0].cancelled.wait()


@pytest.mark.parametrize(
    ("script", "outcome", "rests"),
    [
        ([ServerUnreachableError("gone")], "failed", True),
        ([UnavailableError("queue is full; retry in 7.0 s")], "refused", True),
        ([InvalidRequestError("prompt: too long")], "refused", False),
        ([], "failed", True),
        ([0.01, text("")[0], ServerUnreachableError("gone")], "failed", True),
    ],
)
async def test_whatever_happens_to_the_triton_for_prompts_the_other_one_gets_it_whole(
    script: Any, outcome: str, rests: bool
) -> None:
    if len(script) == 3:  # a chunk without a token
        script[1].choices[0].num_tokens, script[1].choices[0].finish_reason = 0, None
        script[1].choices[0].token_ids = []
    pair = Pair(lambda _: script)
    whole, result = await pair.run()
    assert whole == "ABC" and result.usage.cached_tokens == 3
    assert pair.decode.requests[0].resume_token_ids is None and pair.outcomes == [outcome]
    await pair.run(list(range(1000, 1400)))
    assert pair.outcomes[1:] == (["busy"] if rests else [outcome])


async def test_a_triton_for_prompts_rests_twice_as_long_after_each_failure() -> None:
    pair = Pair(lambda _: [ServerUnreachableError("gone")])
    for rest in (1.0, 2.0, 4.0):
        await pair.run(list(range(1000 * int(rest), 1000 * int(rest) + 300)))
        pair.now += rest - 0.1
        await pair.run(list(range(100_000 * int(rest), 100_000 * int(rest) + 300)))
        pair.now += 0.1
    assert pair.outcomes == ["failed", "busy"] * 3


async def test_a_triton_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_policy, "_UNMEASURED_PATIENCE", 0.05)
    pair = Pair(lambda _: [asyncio.Event()], count=2)
    whole, _ = await pair.run()
    assert whole == "ABC" and pair.outcomes == ["late"]
    assert pair.prefills[0].streams[0].cancelled.is_set()
    await pair.run(list(range(1000, 1300)))
    assert pair.prefills[1].requests, "the first one rests"


async def test_a_stopped_triton_leaves_a_request_most_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a third of it here, which would be 30 s, but less."""
    monkeypatch.setattr(handover_policy, "_UNMEASURED_PATIENCE", 3600.0)
    monkeypatch.setattr(handover_stream, "_SHARE", 1 / 900)
    pair = Pair(lambda _: [asyncio.Event()])
    assert (await pair.run(timeout=90.0))[0] == "ABC" and pair.outcomes == ["late"]
    left = pair.decode.requests[0].timeout
    assert left is not None and left > 60
    await pair.again(1)
    assert pair.outcomes == ["late", "busy"]


async def test_a_deadline_that_a_triton_for_prompts_exceeds_is_its_own() -> None:
    """Such as that of the question what it serves, if its stub hangs."""
    pair = Pair(lambda _: [first()])
    pair.prefills[0].is_silent = True
    assert (await pair.run())[0] == await pair.again(1) == "ABC"
    assert pair.outcomes == ["late", "busy"] and not pair.prefills[0].requests
    assert pair.upstream._costs["demo"].prefill.median(time.monotonic()) is None, "no prompt was slow"


async def test_the_patience_grows_with_prompts_that_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_UNMEASURED_PATIENCE": 0.05, "_LEAST_PATIENCE": 0.05, "_PATIENCE": 100.0}.items():
        monkeypatch.setattr(handover_policy, name, value)
    scripts: list[Script] = [[asyncio.Event()], [0.1, first(), asyncio.Event()]]
    pair = Pair(lambda _: scripts.pop(0))
    assert (await pair.run())[0] == "ABC"
    pair.now += 1.0
    assert await pair.again(1) == "ABC" and pair.outcomes == ["late", "handed_over"]


async def test_after_a_rest_one_prompt_tries_whether_a_triton_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[Any] = [ServerUnreachableError("gone")]
    pair = Pair(lambda _: script)
    await pair.run()
    pair.now += 1.0
    came = asyncio.Event()
    script[:] = [came, first()]
    tries = asyncio.create_task(pair.again(1))
    while len(pair.prefills[0].streams) < 2:
        await asyncio.sleep(0)
    await pair.again(2)
    assert pair.outcomes == ["failed", "busy"]
    came.set()
    assert await tries == await pair.again(3) == "ABC"
    assert pair.outcomes == ["failed", "busy", "handed_over", "handed_over"]


@pytest.mark.parametrize("error", [InvalidRequestError("top_p=2 is out of range"), UnavailableError("the queue of x")])
async def test_a_refusal_of_one_request_shows_that_a_triton_is_well(error: Exception) -> None:
    scripts: list[Script] = [[ServerUnreachableError("gone")], [error], [ServerUnreachableError("gone")]]
    pair = Pair(lambda _: scripts.pop(0) if scripts else [first(), asyncio.Event()])
    for number in range(4):
        await pair.again(number)
        pair.now += 1.0  # not the two of a second failure in a row
    assert pair.outcomes == ["failed", "refused", "failed", "handed_over"]


@pytest.mark.parametrize(
    "whose", ["the queue of tenant 'x' is full: 3 sequences are waiting", "the queue of priority class 3 is full: 9"]
)
async def test_a_refusal_of_one_tenant_stops_no_other(whose: str) -> None:
    full = UnavailableError(f"{whose}; try again later; retry in 7.0 s")
    pair = Pair(lambda request: [full] if request.tenant == "x" else [first(), asyncio.Event()])
    assert await pair.again(1, tenant="x") == await pair.again(2, tenant="y") == "ABC"
    assert pair.outcomes == ["refused", "handed_over"]


async def test_an_error_of_the_tritons_that_generate_is_not_that_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    find, failures = pair.upstream._upstream.find, [APIError(503, "gone", code="upstream_unreachable")]

    async def finds(name: str | None) -> Any:
        if failures:
            raise failures.pop()
        return await find(name)

    monkeypatch.setattr(pair.upstream._upstream, "find", finds)
    assert await pair.again(1) == await pair.again(2) == "ABC"
    assert len(pair.prefills[0].requests) == 1 and pair.outcomes == ["handed_over"]


@pytest.mark.parametrize(
    "change", [{"checkpoint_id": "other"}, {"version": "9"}, {"max_model_len": 1}, {"checkpoint_id": None}]
)
async def test_a_triton_with_something_else_gets_nothing(change: dict[str, Any]) -> None:
    pair = Pair(lambda _: [first()])
    pair.prefills[0].info = pair.prefills[0].info | change
    assert (await pair.run())[0] == "ABC"
    assert not pair.prefills[0].requests and pair.outcomes == ["mismatch"]


async def test_a_triton_without_the_model_gets_nothing_and_does_not_rest() -> None:
    pair = Pair(lambda _: [first()])
    pair.prefills[0].inputs.clear()
    assert (await pair.run())[0] == (await pair.run(list(range(7, 400))))[0] == "ABC"
    assert pair.outcomes == ["mismatch", "mismatch"]


async def test_a_triton_without_the_model_does_not_keep_prompts_from_another(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()], count=2)
    pair.prefills[0].inputs.clear()
    pair.upstream._prefills[1].queued = 1000  # of other prompts
    for number in range(4):
        assert await pair.again(number) == "ABC"
        pair.now += 1.0
    assert pair.outcomes == ["handed_over"] * 4 and len(pair.prefills[1].requests) == 4
    assert [record.message for record in caplog.records] == [
        "the Triton for prompts at p0:1 does not serve model 'demo' as the others do"
    ]
    pair.prefills[0].inputs["demo"] = INPUTS
    pair.now += 2.0
    await pair.again(9)
    assert len(pair.prefills[0].requests) == 1, "it is asked again"


async def test_another_checkpoint_under_the_same_name_computes_no_first_token() -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    await pair.again(1)
    pair.prefills[0].info = pair.prefills[0].info | {"checkpoint_id": "other"}
    pair.now += 1.0
    assert await pair.again(2) == "ABC"
    assert pair.outcomes == ["handed_over", "mismatch"] and len(pair.prefills[0].requests) == 1


async def test_a_change_of_adapters_is_seen_at_once() -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    pair.prefills[0].inputs.clear()
    await pair.again(1)
    pair.prefills[0].inputs["demo"] = INPUTS
    pair.upstream.forget()
    await pair.again(2)
    assert pair.outcomes == ["mismatch", "handed_over"]


class Refusing(ScriptedClient):
    """Its streams are those of a real client, whose only server refuses each request once."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])
        self.retries = dataclasses.replace(Upstream(GatewayOptions()).client.retries, initial_delay=0.0)
        self.endpoints = Endpoints(1)
        self.opened: list[GenerationRequest] = []

    def send(self, request: GenerationRequest) -> Any:
        return AsyncStream(request, self.retries, self)

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Any:
        self.opened.append(request)
        return Answers(len(self.opened) == 1)

    def address(self, index: int) -> str:
        return "d:1"


class Answers:
    """The responses to the request for a rest."""

    def __init__(self, refuses: bool) -> None:
        self._refuses, self._left = refuses, ["B", "C"]

    async def __anext__(self) -> Any:
        if self._refuses:
            raise UnavailableError("the queue is full: 9 sequences are waiting; try again later")
        if not self._left:
            raise StopAsyncIteration
        text = self._left.pop(0)
        counts = {"token_ids": [7], "token_counts": [1], "num_input_tokens": [300]}
        return {"text_output": [text], "finish_reason": ["stop" if not self._left else ""], **counts}

    def cancel(self) -> None: ...


async def test_a_refusal_does_not_break_an_answer_that_has_begun() -> None:
    pair, decode = Pair(lambda _: [first(), asyncio.Event()]), Refusing()
    upstream = HandoverUpstream(
        Upstream(GatewayOptions(), decode), pair.upstream._prefills, "100", pair.outcomes.append
    )
    assert [chunk.text async for chunk in upstream.send(request())] == ["A", "B", "C"]
    assert [one.resume_token_ids for one in decode.opened] == [[[5]], [[5]]] and pair.outcomes == ["handed_over"]


@pytest.mark.parametrize(("theirs", "used"), [("1" * 32, "1" * 32), ("2" * 32, None), ("1" * 32, "2" * 32)])
async def test_an_adapter_must_have_the_same_content(theirs: str, used: str | None) -> None:
    """As both say, and as the one says that computed with it."""
    pair = Pair(lambda _: [first()])
    pair.decode.info = pair.decode.info | {"adapters": {"doll": "1" * 32}}
    pair.prefills[0].info = pair.prefills[0].info | {"adapters": {"doll": theirs}}
    send = pair.prefills[0].send

    def sends(request: GenerationRequest) -> Any:
        stream = send(request)
        stream.adapter_digest = used
        return stream

    pair.prefills[0].send = sends  # type: ignore[method-assign]
    assert (await pair.run(adapter="doll"))[0] == "ABC"
    assert pair.outcomes == (["handed_over"] if theirs == used else ["mismatch"])
    assert bool(pair.decode.requests[0].resume_token_ids) == (theirs == used)


async def test_a_cancelled_request_goes_nowhere_else() -> None:
    pair = Pair(lambda _: [asyncio.Event()])
    stream = pair.upstream.send(request())
    reading = asyncio.create_task(anext(aiter(stream)))
    while not pair.prefills[0].streams:
        await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(Exception, match="cancelled"):
        await reading
    assert not pair.decode.requests and not pair.outcomes
    late = pair.upstream.send(request(list(range(5, 400))))
    late.cancel()
    with pytest.raises(Exception, match="cancelled"):
        await anext(aiter(late))
    assert len(pair.prefills[0].requests) == 1


# -- the whole gateway ---------------------------------------------------------------------


async def test_with_handover_calls_each_triton_once_and_no_other() -> None:
    given = {"triton": ("m=d:1", "e:1"), "models": ("m",), "routing": "prefix", "headers": {"key": "k"}}
    decode = Pair(lambda _: []).upstream._upstream

    def wrapped(**more: Any) -> Any:
        return with_handover(GatewayOptions(**given | more), decode, lambda _: None, lambda _: None)

    assert wrapped() is decode is wrapped(prefill_triton=("p:1",), handover="off")
    for handover, above in (("", None), ("auto", None), ("700", 700)):
        upstream = wrapped(prefill_triton=("p:1", "q:1"), handover=handover)
        assert isinstance(upstream, HandoverUpstream) and upstream._above == above
        assert [one.address for one in upstream._prefills] == ["p:1", "q:1"]
        for prefill in upstream._prefills:
            options = prefill.upstream._options
            assert options.triton == (prefill.address,) and not options.models and not options.prefill_triton
            assert (options.routing, options.reconnect_timeout, options.headers) == ("round-robin", 0.0, {"key": "k"})


async def test_a_streaming_client_sees_one_answer(start: Callable[..., Any]) -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    front = await start(pair.decode, prefills=pair.prefills, handover="100", prefill_triton=("p0:1",))
    body = {"model": "demo", "prompt": IDS, "stream": True, "stream_options": {"include_usage": True}}
    answer = await front.post("/v1/completions", body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "ABC"
    assert events[-1]["usage"] == {
        "prompt_tokens": 300,
        "completion_tokens": 3,
        "total_tokens": 303,
        "prompt_tokens_details": {"cached_tokens": 12},
    }
    whole = (await front.post("/v1/completions", {**body, "stream": False, "stream_options": None})).json()
    assert whole["choices"][0]["text"] == "ABC"
    metrics = (await front.http.get("/metrics")).text
    assert 'inflight_gateway_handovers_total{outcome="handed_over"} 1.0' in metrics
    assert "inflight_gateway_handover_gap_seconds_count 1.0" in metrics


@pytest.mark.parametrize(
    "options",
    [
        {"handover": "auto"},
        {"handover": "12"},
        {"handover": "-1", "prefill_triton": ("p:1",)},
        {"handover": "²", "prefill_triton": ("p:1",)},
        {"handover": "on", "prefill_triton": ("p:1",)},
        {"prefill_triton": ("127.0.0.1:8001",)},
        {"prefill_triton": ("p:1", "p:1")},
        {"prefill_triton": ("m=p:1",)},
        {"prefill_triton": ("",)},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"handover=|prefill_triton="):
        GatewayOptions(**options)
