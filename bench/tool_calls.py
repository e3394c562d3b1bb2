"""How often a model calls the right tool with `tool_choice` "auto", and calls one where none helps.

    python bench/tool_calls.py --url http://127.0.0.1:8000/v1 --model smollm2 --record

Twenty prompts ask for one of four tools, five for each, and twenty for none.  Answers are greedy.  The model decides by
its chat template, or by the gateway's description of the tools where the template has none.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import httpx2
import jsonschema

RESULT = Path(__file__).parent / "results" / "tool_calls.json"

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Get the current weather in a city", city=_TEXT),
    tool("set_timer", "Set a timer for a number of minutes", minutes=_NUMBER),
    tool("convert_currency", "Convert an amount of money", amount=_NUMBER, source=_TEXT, target=_TEXT),
    tool("send_message", "Send a text message to a person", person=_TEXT, text=_TEXT),
]
FITTING = {
    "get_weather": [
        "What is the weather in Paris?",
        "Is it raining in London right now?",
        "Tell me the weather in Tokyo.",
        "How warm is it in Madrid?",
        "Do I need an umbrella in Berlin today?",
    ],
    "set_timer": [
        "Set a timer for 10 minutes.",
        "Remind me in 5 minutes.",
        "Start a 25 minute timer, please.",
        "Wake me up in 30 minutes.",
        "I need a timer of 3 minutes for my eggs.",
    ],
    "convert_currency": [
        "Convert 100 dollars to euros.",
        "How much is 50 pounds in yen?",
        "What are 20 euros in dollars?",
        "Change 1000 yen into dollars.",
        "I have 75 Swiss francs. How many euros is that?",
    ],
    "send_message": [
        "Send Anna a message: I am late.",
        "Tell Bob by text message that dinner is ready.",
        "Text my mother that I arrived.",
        "Write a message to Carl: see you at 8.",
        "Message Dana that the meeting is cancelled.",
    ],
}
OTHERS = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Explain what a noun is.",
    "Write a short poem about the sea.",
    "What is 2 plus 2?",
    "Give me three synonyms of happy.",
    "How do bees make honey?",
    "Say hello in Spanish.",
    "Why is the sky blue?",
    "What is a triangle?",
    "Name two planets.",
    "Tell me a joke.",
    "What does a doctor do?",
    "Summarize the story of Cinderella.",
    "What is the opposite of hot?",
    "How many legs does a spider have?",
    "Write a title for a book about cats.",
    "What is photosynthesis?",
    "Who was the first president of the United States?",
    "Correct the sentence: he go to school.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base_url of the gateway")
    parser.add_argument("--model", required=True)
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    with httpx2.Client(base_url=options.url, headers={"Authorization": f"Bearer {key}"}, timeout=600) as http:
        asked = [(name, prompt) for name, prompts in FITTING.items() for prompt in prompts]
        rows = [ask(http, options.model, prompt, name) for name, prompt in [*asked, *((None, one) for one in OTHERS)]]
    fitting, others = [row for row in rows if row["wanted"]], [row for row in rows if not row["wanted"]]
    summary = {
        "fitting": len(fitting),
        "called": sum(bool(row["calls"]) for row in fitting),
        "right_tool": sum(row["right_tool"] for row in fitting),
        "valid_arguments": sum(row["valid_arguments"] for row in fitting),
        "others": len(others),
        "called_without_need": sum(bool(row["calls"]) for row in others),
    }
    print(json.dumps(summary, indent=2))
    if options.record:
        RESULT.write_text(json.dumps({"model": options.model, **summary, "rows": rows}, indent=1) + "\n")


def ask(http: httpx2.Client, model: str, prompt: str, wanted: str | None) -> dict[str, Any]:
    """One row of the record: the calls, and whether the first is the wanted one with arguments that validate."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 80,
    }
    message = http.post("chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    right = bool(calls) and calls[0]["name"] == wanted
    row = {"prompt": prompt, "wanted": wanted, "calls": calls, "content": message["content"], "right_tool": right}
    print(json.dumps(row), flush=True)
    return {**row, "valid_arguments": right and valid(calls[0])}


def valid(call: dict[str, str]) -> bool:
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    try:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
