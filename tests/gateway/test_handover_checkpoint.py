"""The Triton for prompts gets another checkpoint after it has told what it serves: its token goes to no client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from scripted_client import INPUTS, ScriptedClient

from inflight_client import ChoiceDelta, InvalidRequestError, StreamChunk
from inflight_client.request import GenerationRequest
from inflight_gateway.handover import HandoverUpstream, PrefillTriton
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream

MINE, OTHER = "c0ffee", "decaf"


class NamingClient(ScriptedClient):
    """Its responses name their checkpoint, if they are asked to.

    Attributes:
        loaded: the checkpoint that answers.
        outputs: names of the model's outputs.
    """

    def __init__(self, parts: Iterable[str], loaded: str | None = MINE, ends: bool = True) -> None:
        super().__init__(self._chunks)
        self.parts, self.loaded, self.ends = list(parts), loaded, ends
        self.inputs = {"demo": (*INPUTS, "return_checkpoint_id")}
        self.outputs = ["text_output", "checkpoint_id"]

    async def metadata(self, model: str) -> dict[str, Any]:
        return await super().metadata(model) | {"outputs": [{"name": name} for name in self.outputs]}

    def _chunks(self, request: GenerationRequest) -> Iterable[Any]:
        if request.return_checkpoint_id and not self._lists_tensors():
            yield InvalidRequestError("unexpected inference input 'return_checkpoint_id' for model 'demo'")
        told = self.loaded if request.return_checkpoint_id else None
        parts = self.parts[1:] if request.resume_token_ids else self.parts
        for number, part in enumerate(parts):
            reason = "stop" if self.ends and number == len(parts) - 1 else None
            yield StreamChunk([ChoiceDelta(0, part, [7], 1, reason)], 300, 0, checkpoint_id=told)
        if not self.ends:
            yield asyncio.Event()  # it would go on

    def _lists_tensors(self) -> bool:
        return "return_checkpoint_id" in self.inputs["demo"] and "checkpoint_id" in self.outputs

    def forget_tensors(self, lacks: str) -> None:
        """As with a `config.pbtxt` that does not list them."""
        if lacks == "inputs":
            self.inputs["demo"] = INPUTS
        else:
            self.outputs.remove("checkpoint_id")


class Pair:
    """A Triton that generates "ABC", and others whose first token is "x", or "A" if they have the same checkpoint."""

    def __init__(self, *prefills: NamingClient) -> None:
        options = GatewayOptions(reconnect_timeout=0)
        self.decode, self.prefills, self.outcomes = NamingClient("ABC"), prefills, list[str]()
        tritons = [PrefillTriton(f"p{i}:1", Upstream(options, one), lambda: 0.0) for i, one in enumerate(prefills)]
        self.upstream = HandoverUpstream(Upstream(options, self.decode), tritons, "100", self.outcomes.append)

    async def text(self, number: int = 0) -> str:
        ids = list(range(1000 * number, 1000 * number + 300))
        request = GenerationRequest.build(None, None, ids, {}, model="demo", timeout=None)
        return "".join([chunk.text async for chunk in self.upstream.send(request)])


@pytest.mark.parametrize("ends", [False, True])
async def test_a_token_of_another_checkpoint_is_dropped_and_the_whole_answer_computed(ends: bool) -> None:
    """It was loaded between the question and the prompt: the facts are those of the old one for a second."""
    pair = Pair(NamingClient("A", ends=False))
    assert await pair.text() == "ABC" and pair.outcomes == ["handed_over"]
    [prefill] = pair.prefills
    prefill.parts, prefill.loaded, prefill.ends = ["x"], OTHER, ends
    assert await pair.text(1) == "ABC" and pair.outcomes[1:] == ["mismatch"]
    assert len(prefill.requests) == 2, "it was asked"
    assert prefill.streams[1].cancelled.is_set() != ends, "an end and a cancellation must not race"
    rest, whole = pair.decode.requests
    assert rest.resume_token_ids == [[7]] and whole.resume_token_ids is None
    assert not rest.return_checkpoint_id and not whole.return_checkpoint_id
    assert await pair.text(2) == "ABC" and len(prefill.requests) == 2, "it is left out for a while"


async def test_the_next_triton_for_prompts_gets_the_prompt() -> None:
    pair = Pair(NamingClient("x", OTHER, ends=False), NamingClient("A", ends=False))
    assert await pair.text() == "ABC" and pair.outcomes == ["handed_over"]
    assert [len(one.requests) for one in pair.prefills] == [1, 1]


async def test_a_response_that_does_not_say_its_checkpoint_counts_as_another_one() -> None:
    pair = Pair(NamingClient("x", None, ends=False))
    assert await pair.text() == "ABC" and pair.outcomes == ["mismatch"]


@pytest.mark.parametrize("lacks", ["inputs", "outputs"])
async def test_a_triton_without_these_tensors_is_judged_by_what_it_told(lacks: str) -> None:
    pair = Pair(NamingClient("A", None, ends=False))
    pair.prefills[0].forget_tensors(lacks)
    assert await pair.text() == "ABC" and pair.outcomes == ["handed_over"]
    assert not pair.prefills[0].requests[0].return_checkpoint_id


@pytest.mark.parametrize("lacks", ["inputs", "outputs"])
async def test_the_triton_that_generates_need_not_have_them(lacks: str) -> None:
    pair = Pair(NamingClient("x", OTHER, ends=False), NamingClient("A", ends=False))
    pair.decode.forget_tensors(lacks)
    assert await pair.text() == "ABC" and pair.outcomes == ["handed_over"]
    assert [len(one.requests) for one in pair.prefills] == [1, 1], "the first one said that it has another checkpoint"
