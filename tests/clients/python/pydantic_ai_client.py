"""pydantic-ai's agents, with its models for OpenAI's chats and responses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from asked import CAPITAL, KEY, MODEL, URL, Person
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    RunContext,
    ToolDefinition,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PERSON = "Tom is a baker. He is 42 years old. Write it as JSON."
GREEDY = ModelSettings(temperature=0, max_tokens=24)
LONGER = ModelSettings(temperature=0, max_tokens=200)


def model(name: str = MODEL, key: str = KEY) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=key))


class TestText:
    def test_an_agent(self) -> None:
        answer = Agent(model(), model_settings=GREEDY).run_sync(CAPITAL)
        assert answer.output == "The capital of France is Paris."

    def test_a_conversation_goes_on(self) -> None:
        agent = Agent(model(), model_settings=GREEDY, instructions="Be brief.")
        first = agent.run_sync(CAPITAL)
        assert agent.run_sync("And of Italy?", message_history=first.all_messages()).output


class TestAsync:
    async def test_an_agent(self) -> None:
        answer = await Agent(model(), model_settings=GREEDY).run(CAPITAL)
        assert answer.output == "The capital of France is Paris."


class TestStreaming:
    async def test_the_pieces_are_the_whole_answer(self) -> None:
        agent = Agent(model(), model_settings=GREEDY)
        async with agent.run_stream(CAPITAL) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 1 and "".join(pieces) == (await agent.run(CAPITAL)).output


class TestTools:
    def test_a_tool_is_called_before_the_output(self) -> None:
        """With an output type the library asks with "required".  A model of this size would make calls for ever."""
        one = ModelSettings(**LONGER, parallel_tool_calls=False)
        agent = Agent(model(), model_settings=one, output_type=Person)
        seen: list[str] = []

        async def only_first(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
            return None if seen else definition

        @agent.tool_plain(prepare=only_first)
        def age_of(name: Literal["Tom", "Anna"]) -> int:
            """The age of a person."""
            seen.append(name)
            return 42

        answer = agent.run_sync(PERSON)
        assert isinstance(answer.output, Person) and len(seen) == 1
        calls = [part for message in answer.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
        assert calls and {call.tool_name for call in calls} <= {"age_of", "final_result"}


class TestStructuredOutput:
    @pytest.mark.parametrize("how", [lambda form: form, NativeOutput], ids=["by a tool", "native"])
    def test_a_person(self, how: Any) -> None:
        answer = Agent(model(), model_settings=LONGER, output_type=how(Person)).run_sync(PERSON)
        assert answer.output.age == 42 and answer.output.job == "baker"

    async def test_a_streamed_person(self) -> None:
        agent = Agent(model(), model_settings=LONGER, output_type=NativeOutput(Person))
        async with agent.run_stream(PERSON) as stream:
            assert (await stream.get_output()).age == 42

    def test_prompted(self) -> None:
        """Its schema is in the prompt; the format `json_object` promises an object only."""
        agent = Agent(model(), model_settings=LONGER, output_type=PromptedOutput(Person), retries=0)
        try:
            assert isinstance(agent.run_sync(PERSON).output, Person)
        except UnexpectedModelBehavior as error:
            assert "retries" in str(error) or "validation" in str(error)


class TestSampling:
    def test_a_seed_repeats_and_a_stop_string_ends(self) -> None:
        warm = Agent(model(), model_settings=ModelSettings(temperature=1, seed=5, max_tokens=16))
        assert warm.run_sync(CAPITAL).output == warm.run_sync(CAPITAL).output
        stop = Agent(model(), model_settings=ModelSettings(**GREEDY, stop_sequences=[" is"]))
        assert stop.run_sync(CAPITAL).output == "The capital of France"


class TestUsage:
    async def test_whole_and_streamed(self) -> None:
        agent = Agent(model(), model_settings=GREEDY)
        whole = (await agent.run(CAPITAL)).usage
        async with agent.run_stream(CAPITAL) as stream:
            await stream.get_output()
        streamed = stream.usage
        assert whole.input_tokens == streamed.input_tokens > 0
        assert whole.output_tokens == streamed.output_tokens > 0


class TestErrors:
    def test_they_have_the_status(self) -> None:
        for wrong, status in ((model("gpt-4"), 404), (model(key="wrong"), 401)):
            with pytest.raises(ModelHTTPError) as error:
                Agent(wrong).run_sync(CAPITAL)
            assert error.value.status_code == status
        with pytest.raises(ModelHTTPError) as error:
            Agent(model(), model_settings=ModelSettings(temperature=-1)).run_sync(CAPITAL)
        assert error.value.status_code == 400


class TestResponses:
    def test_text_and_a_person(self) -> None:
        asked = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
        assert Agent(asked, model_settings=GREEDY).run_sync(CAPITAL).output == "The capital of France is Paris."
        answer = Agent(asked, model_settings=LONGER, output_type=NativeOutput(Person)).run_sync(PERSON)
        assert answer.output.age == 42
