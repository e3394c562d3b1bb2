"""Prompts that one Triton computes and another one continues, in front of scripted clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from scripted_client import Script, ScriptedClient, text

from inflight_client import ChoiceDelta, InvalidRequestError, ServerUnreachableError, StreamChunk, UnavailableError
from inflight_client.request import GenerationRequest
from inflight_gateway import handover_policy
from inflight_gateway.handover import HandoverUpstream, PrefillTriton
from inflight_gateway.handover_policy import Costs, Prompt, SentPrefixes, can_be_handed_over, pays
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream

IDS = list(range(300))


def request(prompt: Any = IDS, **options: Any) -> GenerationRequest:
    kind = {"input_ids": prompt} if isinstance(prompt, list) and isinstance(prompt[0], int) else {}
    if isinstance(prompt, str):
        kind = {"prompt": prompt}
    return GenerationRequest.build(
        kind.get("prompt"), None if kind else prompt, kind.get("input_ids"), options, model="demo", timeout=None
    )  # type: ignore[arg-type]


def first(*, token: int = 5, prompt: int = 300, cached: int = 12, finish: str | None = None) -> StreamChunk:
    delta = ChoiceDelta(index=0, text="A", token_ids=[token], num_tokens=1, finish_reason=finish)
    return StreamChunk([delta], num_input_tokens=prompt, num_cached_tokens=cached)


class Pair:
    """A Triton for prompts and one that continues."""

    def __init__(self, prefill: Callable[[GenerationRequest], Script], handover: str = "100", count: int = 1) -> None:
        self.decode = ScriptedClient(self._answer)
        self.prefills = [ScriptedClient(prefill) for _ in range(count)]
        self.outcomes: list[str] = []
        self.gaps: list[float] = []
        self.now = 0.0
        options = GatewayOptions(reconnect_timeout=0)
        tritons = [
            PrefillTriton(f"p{i}:1", Upstream(options, one), lambda: self.now) for i, one in enumerate(self.prefills)
        ]
        decode = Upstream(options, self.decode)
        self.upstream = HandoverUpstream(decode, tritons, handover, self.outcomes.append, self.gaps.append)

    @staticmethod
    def _answer(request: GenerationRequest) -> Script:
        rest = [text("B", prompt=300)[0], text("C", prompt=300)[0]]
        rest[0].choices[0].finish_reason = None
        rest[0].num_cached_tokens = 288
        return rest if request.resume_token_ids else [first(cached=3), *rest]

    async def run(self, prompt: Any = IDS, **options: Any) -> tuple[str, Any]:
        """The text that arrives, and the result."""
        stream = self.upstream.send(request(prompt, **options))
        found = [chunk.text async for chunk in stream]
        return "".join(found), stream.result()


async def test_the_first_token_comes_from_one_triton_and_the_rest_from_the_other() -> None:
    pair = Pair(lambda _: [first(), asyncio.Event()])
    text, result = await pair.run(temperature=1.0, tenant="t", cache_salt="s", request_priority=3, timeout=50.0)
    assert text == "ABC" == result.text and result.token_ids == [5, 7, 7]
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cached_tokens) == (300, 3, 12)
    [asked], [rest] = pair.prefills[0].requests, pair.decode.requests
    assert asked.resume_token_ids is None and rest.resume_token_ids == [[5]]
    assert asked.sampling == {"temperature": 1.0} and rest.sampling == {"temperature": 1.0, "seed": 1234}
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


NEVER: list[dict[str, Any]] = [
    {"n": 2},
    {"extra_parameters": {"num_return_sequences": 2}},
    {"max_tokens": 1},
    {"prompt_logprobs": 0},
    {"resume_token_ids": [4], "seed": 1},
    {"extra_parameters": {"output_kind": 0}},
]


@pytest.mark.parametrize("options", NEVER)
def test_some_requests_are_never_handed_over(options: dict[str, Any]) -> None:
    assert not can_be_handed_over(request(**options))
    assert can_be_handed_over(request(max_tokens=2, logprobs=3, stop=["x"], seed=4))


async def test_short_and_cached_prompts_are_not_handed_over() -> None:
    pair = Pair(lambda _: [first()], handover="300")
    await pair.run(IDS)
    assert not pair.outcomes
    await pair.run([*IDS, 1])  # 256 of them are likely cached
    assert not pair.outcomes
    await pair.run([*IDS, 1], tenant="other")
    assert pair.outcomes == ["handed_over"]


# -- what is likely cached -----------------------------------------------------------------


def test_prompts_that_begin_alike_have_been_sent() -> None:
    sent, long = SentPrefixes(), "abcd" * 1000
    assert sent.sent(request(long)) == Prompt(1000, 0)
    assert sent.sent(request(long + "e")) == Prompt(1000, 768)
    assert sent.sent(request("e" + long)) == Prompt(1000, 0)
    turns = [{"role": "user", "content": long}]
    assert sent.sent(request(turns)).cached == 0
    assert sent.sent(request([*turns, {"role": "assistant", "content": "Two"}])).cached == 768
    for other in ({"tenant": "a"}, {"cache_salt": "a"}, {"adapter": "a"}):
        assert sent.sent(request(long, **other)).cached == 0
    assert sent.sent(request(list(range(600)))) == Prompt(600, 0)
    assert sent.sent(request(list(range(520)))) == Prompt(520, 512)


def test_few_pieces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_policy, "_REMEMBERED", 3)
    sent = SentPrefixes()
    for start in (0, 10_000):
        sent.sent(request(list(range(start, start + 512))))
    assert sent.sent(request(list(range(512)))).cached == 0


# -- what pays -----------------------------------------------------------------------------


def test_auto_compares_what_was_measured() -> None:
    costs = Costs()
    assert pays(costs, 0, 256, 10_000) and not pays(costs, 0, 255, 0), "nothing is measured"
    costs.alone.add(0, 0.001)
    assert pays(costs, 0, 1000, 0)
    costs.transfer.add(0, 0.5)
    assert pays(costs, 0, 501, 0) and not pays(costs, 0, 499, 0)
    costs.prefill.add(0, 0.0005)
    assert pays(costs, 0, 1000, 1999) and not pays(costs, 0, 1000, 2001), "its queue is too long"
    assert pays(costs, 61, 256, 0), "what was measured a minute ago tells nothing"


async def test_auto_measures_prompts_and_handovers() -> None:
    pair = Pair(lambda _: [first(cached=0)], handover="auto")
    costs = pair.upstream._costs["demo"]
    await pair.run()
    assert pair.outcomes == ["handed_over"]
    assert costs.prefill.median(1e-9) and costs.transfer.median(1e-9) is not None and costs.alone.median(0) is None
    for _ in range(2):
        costs.transfer.add(time.monotonic(), 1e9)
    await pair.run(list(range(1000, 1300)))
    assert pair.outcomes == ["handed_over"] and costs.alone.median(1e-9)
    await pair.run([1, 2, 3])
    assert pair.decode.requests[-1].input_ids == [1, 2, 3]


# -- the whole gateway ---------------------------------------------------------------------


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
