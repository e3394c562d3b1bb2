"""DSPy, which asks through LiteLLM."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import pytest
from asked import CAPITAL, KEY, MODEL, SECONDS, URL


def model(name: str = MODEL, key: str = KEY, **options: Any) -> dspy.LM:
    options = {"temperature": 0, "max_tokens": 200, "cache": False, "num_retries": 0, "timeout": SECONDS, **options}
    return dspy.LM(f"openai/{name}", api_base=URL, api_key=key, **options)


class TestText:
    def test_a_prompt(self) -> None:
        assert model(max_tokens=24)(CAPITAL) == ["The capital of France is Paris."]


class TestStructuredOutput:
    def test_a_signature_through_json(self) -> None:
        """DSPy asks for a schema only from models that it knows: the schema of this one comes from the caller."""

        class Job(dspy.Signature):
            """Extract the job."""

            text: str = dspy.InputField()
            job: Literal["baker", "pilot", "nurse"] = dspy.OutputField()

        schema = {
            "type": "object",
            "properties": {"job": {"enum": ["baker", "pilot", "nurse"]}},
            "required": ["job"],
            "additionalProperties": False,
        }
        asked = model(response_format={"type": "json_schema", "json_schema": {"name": "job", "schema": schema}})
        with dspy.context(lm=asked, adapter=dspy.JSONAdapter()):
            assert dspy.Predict(Job)(text="Tom is a baker.").job == "baker"


class TestAsync:
    async def test_a_prompt(self) -> None:
        assert await model(max_tokens=24).acall(CAPITAL) == ["The capital of France is Paris."]


class TestSampling:
    def test_two_choices(self) -> None:
        assert len(model(temperature=1, n=2, max_tokens=16)("Tell a story.")) == 2


class TestUsage:
    def test_of_the_last_call(self) -> None:
        asked = model(max_tokens=24)
        asked(CAPITAL)
        usage = asked.history[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


class TestErrors:
    def test_a_wrong_model(self) -> None:
        with pytest.raises(Exception, match="gpt-4"):
            model("gpt-4")(CAPITAL)
