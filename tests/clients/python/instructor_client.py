"""instructor, with OpenAI's package below it."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from asked import ASK_PERSON, ASK_WEATHER, KEY, MODEL, SECONDS, URL, Person, Weather
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import AsyncOpenAI, OpenAI

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 200}
# JSON and MD_JSON only prompt for the schema, and leave its enforcement to instructor's retries.
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]


def client(mode: instructor.Mode = instructor.Mode.TOOLS, key: str = KEY) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=URL, api_key=key, max_retries=0, timeout=SECONDS), mode=mode)


class TestStructuredOutput:
    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_a_person(self, mode: instructor.Mode) -> None:
        found = client(mode).create(messages=ASK_PERSON, response_model=Person, max_retries=0, **GREEDY)
        assert found.age == 42 and found.job == "baker"

    def test_with_the_completion(self) -> None:
        found, completion = client().create_with_completion(
            messages=ASK_WEATHER, response_model=Weather, max_retries=0, **GREEDY
        )
        assert isinstance(found, Weather) and completion.choices[0].finish_reason == "tool_calls"

    def test_an_answer_that_is_cut_off(self) -> None:
        with pytest.raises((IncompleteOutputException, InstructorRetryException)):
            client().create(messages=ASK_PERSON, response_model=Person, max_retries=0, **{**GREEDY, "max_tokens": 3})


class TestStreaming:
    def test_a_person_grows(self) -> None:
        *_, last = client().create_partial(messages=ASK_PERSON, response_model=Person, max_retries=0, **GREEDY)
        assert last.age == 42


class TestAsync:
    async def test_a_person(self) -> None:
        several = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=SECONDS))
        found = await several.create(messages=ASK_PERSON, response_model=Person, max_retries=0, **GREEDY)
        assert found.age == 42


class TestErrors:
    def test_a_wrong_key_and_a_wrong_model(self) -> None:
        for asked, key in ((GREEDY, "wrong"), ({**GREEDY, "model": "gpt-4"}, KEY)):
            with pytest.raises((InstructorRetryException, openai.APIStatusError)) as error:
                client(key=key).create(messages=ASK_PERSON, response_model=Person, max_retries=0, **asked)
            assert "401" in str(error.value) or "404" in str(error.value)
