"""`AsyncLLM` and `LLM.chat`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inflight import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from inflight.engine.integrity import check_core
from inflight.frontend.chat.chat_messages import ChatTemplateError

DEMO = str(Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ word }}"
OPTIONS: dict[str, Any] = dict(dtype="float32", kv_cache_memory="16MiB", chat_template=TEMPLATE)
PROMPTS = ["Return a list of", "Open the file and", "The default value is"]
CHAT = [{"role": "user", "content": "Return a list of"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(DEMO, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    torch.set_num_threads(1)
    made = AsyncLLM(DEMO, **OPTIONS)
    yield made
    made.close()


def test_output_kinds_and_ids_of_the_caller(async_llm: AsyncLLM) -> None:
    async def run(kind: RequestOutputKind) -> list[RequestOutput]:
        params = replace(GREEDY, output_kind=kind, logprobs=1, n=2)
        return [output async for output in async_llm.generate(PROMPTS[0], params, "mine")]

    cumulative, delta, final = (asyncio.run(run(kind)) for kind in RequestOutputKind)
    assert len(final) == 1
    assert {output.request_id for output in (*cumulative, *delta, *final)} == {"mine"}
    for index, whole in enumerate(final[0].outputs):
        assert whole.finished() and whole == cumulative[-1].outputs[index]
        parts = [output.outputs[index] for output in delta]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [place for part in parts for place in part.logprobs or ()] == whole.logprobs
        assert (parts[-1].finish_reason, len(whole.token_ids)) == ("length", 12)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_outputs_come_while_the_request_runs(async_llm: AsyncLLM, kind: RequestOutputKind) -> None:
    """Of so many tokens that even a starved caller sees the first ones before the last."""

    async def first() -> RequestOutput:
        outputs = async_llm.generate(PROMPTS[0], replace(GREEDY, output_kind=kind, max_tokens=2000, ignore_eos=True))
        try:
            return await anext(outputs)
        finally:
            await outputs.aclose()

    output = asyncio.run(first())
    assert 0 < len(output.outputs[0].token_ids) < 2000 and not output.finished


def test_a_template_for_one_call(llm: LLM, async_llm: AsyncLLM) -> None:
    template = "{{ messages[-1].content }} now"
    (output,) = llm.chat(CHAT, GREEDY, chat_template=template)
    assert output.prompt == "Return a list of now"
    (usual,) = llm.chat(CHAT, GREEDY)
    assert usual.prompt != output.prompt

    async def run() -> RequestOutput:
        return await last(async_llm.chat(CHAT, GREEDY, chat_template=template))

    assert asyncio.run(run()).outputs == output.outputs
    with pytest.raises(ChatTemplateError, match="must be a string with Jinja source"):
        llm.chat(CHAT, GREEDY, chat_template=5)  # type: ignore[arg-type]


async def last(outputs: Any) -> Any:
    texts = [""]
    async for output in outputs:
        assert output.outputs[0].text.startswith(texts[-1])
        texts.append(output.outputs[0].text)
    assert output.finished
    return output


def test_tasks_share_the_batch_and_get_the_tokens_of_llm(llm: LLM, async_llm: AsyncLLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)

    async def run() -> list[Any]:
        return await asyncio.gather(*(last(async_llm.generate(prompt, GREEDY)) for prompt in PROMPTS))

    for _ in range(2):  # each `run` has a loop of its own
        found = asyncio.run(run())
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
        assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]


def test_an_output_does_not_change_after_it_was_given(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        seen = [(output, len(output.outputs[0].token_ids)) async for output in async_llm.generate(PROMPTS[0], GREEDY)]
        assert all(len(output.outputs[0].token_ids) == length for output, length in seen)

    asyncio.run(run())


def test_what_is_cancelled_or_closed_is_aborted(async_llm: AsyncLLM) -> None:
    endless = SamplingParams(max_tokens=2000, ignore_eos=True)

    async def run() -> None:
        stream = async_llm.generate(PROMPTS[0], endless)
        await anext(stream)
        task = asyncio.ensure_future(last(async_llm.generate(PROMPTS[1], endless)))
        await anext(stream)
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await last(async_llm.generate(PROMPTS[2], GREEDY))

    asyncio.run(run())
    async_llm.engine.step()  # the aborts have had their turn
    assert not async_llm.engine.has_open
    check_core(async_llm.engine.core)


def test_a_request_that_is_opened_after_its_loop_has_cancelled_all_is_aborted(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.run` cancels what is left, and then waits for the threads."""
    asked, goes_on, submit = threading.Event(), threading.Event(), async_llm.engine.submit

    def late(*arguments: Any) -> Any:
        asked.set()
        assert goes_on.wait(60)
        return submit(*arguments)

    monkeypatch.setattr(async_llm.engine, "submit", late)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        end = loop.shutdown_default_executor
        loop.shutdown_default_executor = lambda *seconds: goes_on.set() or end(*seconds)  # type: ignore[method-assign]
        task = asyncio.ensure_future(last(async_llm.generate(PROMPTS[0], SamplingParams(max_tokens=2000))))
        await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    async_llm.engine.step()  # the abort has had its turn
    assert not async_llm.engine.has_open


def test_a_request_that_is_opened_after_its_task_was_dropped_is_aborted(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that ends without another turn for its tasks leaves them to the garbage collection."""
    goes_on, submitted, submit = threading.Event(), threading.Event(), async_llm.engine.submit

    def late(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return submit(*arguments)

    monkeypatch.setattr(async_llm.engine, "submit", late)
    abort = async_llm._abort_all

    def abort_all(requests: Any) -> None:
        abort(requests)
        submitted.set()

    monkeypatch.setattr(async_llm, "_abort_all", abort_all)

    async def run() -> None:
        prompts, params = [(None, [1, 2, 3])], [SamplingParams(max_tokens=2000, ignore_eos=True)]
        waits = async_llm._submitted(lambda: async_llm.engine.submit(prompts, params, lambda request: None))
        waits.send(None)
        waits.close()
        goes_on.set()
        await asyncio.to_thread(submitted.wait, 60)

    asyncio.run(run())
    async_llm.engine.step()  # the abort has had its turn
    assert submitted.is_set() and not async_llm.engine.has_open


def test_errors_reach_the_task_that_caused_them(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        for prompt, params, message in [
            ([], GREEDY, "the prompt is empty"),
            (5, GREEDY, "a prompt of type int"),
            ("a", "greedy", "sampling_params of type str"),
        ]:
            with pytest.raises(ValueError, match=message):
                await anext(async_llm.generate(prompt, params))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(async_llm.engine.core, "step", lambda: 1 / 0)
            with pytest.raises(Exception, match="interrupted by ZeroDivisionError"):
                await last(async_llm.generate(PROMPTS[0], GREEDY))
        await last(async_llm.generate(PROMPTS[0], GREEDY))

    asyncio.run(run())


def test_chats(llm: LLM, async_llm: AsyncLLM) -> None:
    (one,) = llm.chat(CHAT, GREEDY)
    assert one.prompt == "user: Return a list of\n"
    assert one.prompt_token_ids == llm.tokenizer.encode(one.prompt, add_special_tokens=False)
    both = llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "names"}]], GREEDY)
    assert [result.prompt for result in both] == [one.prompt, one.prompt + "assistant: names\n"]
    assert both[0].outputs[0].token_ids == one.outputs[0].token_ids
    (varied,) = llm.chat(CHAT, GREEDY, chat_template_kwargs={"word": "Now"})
    assert varied.prompt == one.prompt + "Now"
    assert asyncio.run(last(async_llm.chat(CHAT, GREEDY))).outputs[0].token_ids == one.outputs[0].token_ids
    with pytest.raises(ChatTemplateError, match="message 0 is not an object with a role"):
        llm.chat([{"content": "a"}], GREEDY)
    with pytest.raises(ValueError, match="a conversation is made of dicts"):
        llm.chat([{"role": "user", "content": object()}], GREEDY)


def test_progress(llm: LLM) -> None:
    class Bar:
        count, closed = 0, False

        def __init__(self, total: int, desc: str) -> None:
            bars.append(self)
            self.total = total

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert [(bar.total, bar.count, bar.closed) for bar in bars] == [(3, 3, True)]
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(bars) == 1


def test_the_tokenizer_of_transformers(llm: LLM) -> None:
    assert llm.get_tokenizer()(PROMPTS[0])["input_ids"] == llm.tokenizer.encode(PROMPTS[0])
