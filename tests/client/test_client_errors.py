"""Messages of Triton and of our backend, and the exceptions they select."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_tree import source_tree

import inflight
from inflight.runner.pooling import UNUSABLE_VECTOR
from inflight.sampling.unusable import UNUSABLE_LOGITS
from inflight_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
    code_of_message,
    error_for,
)

MESSAGES = [
    (UnavailableError, "the queue is full: max_queue_size=4 sequences are waiting; try again later"),
    (UnavailableError, "the engine process died (signal 9); it is being restarted"),
    (UnavailableError, "the engine is being restarted and 8 sequences wait for it (max_queue_size=8)"),
    (UnavailableError, "the model is being unloaded"),
    (UnavailableError, "Request for unknown model: 'demo' has no available versions"),
    (UnavailableError, "Exceeds maximum queue size"),
    (DeadlineExceededError, "deadline exceeded: the request's timeout of 0.5 s ran out after 3 output tokens"),
    (DeadlineExceededError, "Request timeout expired"),
    (RequestCancelledError, "Request was cancelled"),
    (InvalidRequestError, "Request for unknown model: 'x' is not found"),
    (UnavailableError, "the request waited too long for its grammar to compile; try again later"),
    (InvalidRequestError, "temperature=-1.0 is out of range: must be in [0.0, 100.0]"),
    (InvalidRequestError, "temperature=-1 is out of range: allowed is [0.0, 100.0]"),
    (InvalidRequestError, "output_token_ids: token id 50 is not in the vocabulary [0, 49]"),
    (InvalidRequestError, "request_priority='x': allowed is an integer in [-2147483648, 2147483647]"),
    (InvalidRequestError, "timeout=-5: allowed is a number of microseconds, 0 for none"),
    (InvalidRequestError, "the prompt has 0 tokens: allowed are 1 to 63 (max_model_len=64 less one output token)"),
    (InvalidRequestError, "no prompt, or an empty one, came: give exactly one of text_input, input_ids, messages"),
    (InvalidRequestError, "sampling_parameters: not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    (InvalidRequestError, "text_input is not valid UTF-8: byte 0xff at 0"),
    (InvalidRequestError, "unexpected inference input 'foo' for model 'demo'"),
    (InvalidRequestError, "unknown sampling parameter 'foo'; known are: bad_words, end_id"),
    (InvalidRequestError, "the prompt has 9999 characters, which is surely more than 63 tokens"),
    (
        InvalidRequestError,
        "the request never fits: 5 prompt and up to 99 output tokens take 7 KV blocks; lower max_tokens",
    ),
    (InvalidRequestError, "the prompt has 64 tokens: at most 63 fit max_model_len=64 with one output"),
    (InvalidRequestError, 'step_trace is off: set "step_trace": true in model.json and load the model again'),
    (InvalidRequestError, "input 'text_input' already exists in request"),
    (UnavailableError, "Server is stopping, scheduler for model has stopped accepting new inference requests"),
    (UnavailableError, "Stub process 'demo_0_0' is not healthy."),
    (ServerError, UNUSABLE_LOGITS),
    (ServerError, "KeyError: 'x'"),
    (ServerError, "an unknown kind of error"),
]


def test_messages_select_their_exception() -> None:
    for kind, message in MESSAGES:
        error = error_for(code_of_message(message), message)
        assert type(error) is kind
        assert error.message == message == str(error)


def test_an_unknown_message_gets_the_default() -> None:
    assert code_of_message("hm", default="NOT_FOUND") == "NOT_FOUND"


def spelled_out(node: ast.expr) -> str | None:
    """A message as written in the source, with placeholders filled in; None for a variable."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def backend_errors() -> list[tuple[str, str]]:
    """(code, message) of every error that the backend's source states literally."""
    package = Path(inflight.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(source_tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                arguments = {"RequestError": node.args, "RequestFailed": node.args[1:]}.get(node.func.id, [])
                texts = [spelled_out(argument) for argument in arguments[:2]]
                if len(texts) == 2 and texts[0] and texts[1] and any(map(str.isalpha, texts[1].replace("X", ""))):
                    found.append((texts[0], texts[1]))
    return found


def test_the_client_understands_every_message_of_the_backend() -> None:
    errors = backend_errors()
    assert {code for code, _ in errors} >= {"INVALID_ARG", "UNAVAILABLE", "CANCELLED"}
    fine = {"INVALID_ARG": {"INVALID_ARGUMENT"}, "CANCELLED": {"CANCELLED", "DEADLINE_EXCEEDED"}}
    # These begin with the name of a key, or of what is asked, which the source has in a variable.
    known = {
        "X=X: X": "lora_path=X: X",
        "inputs[X]: X": "inputs[1]: X must be Y",
        "control=X X; got X": "control='X' X; got X",
    }
    wrong = [
        (code, said) for code, said in errors if code_of_message(known.get(said, said)) not in fine.get(code, {code})
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "said",
    [
        "lora_name: the name 'a,b' has a comma or a control character; choose another name",
        "lora_name: a name of 3000 bytes: 1 to 1024 are allowed (max_name_bytes)",
        "adapter 'goat': adapter_model.safetensors is cut off; copy it again",
        "adapter 'goat': bias='all' is not served: train with bias='none', or merge the adapter",
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_the_callers_mistake(said: str) -> None:
    """The gateway answers with 400, not 500."""
    assert code_of_message(said) == "INVALID_ARGUMENT"


def test_every_refusal_of_a_request_for_vectors_is_the_callers_mistake() -> None:
    """Their messages reach clients as `InvalidRequestError`, never as a fault of the server."""
    folder = Path(inflight.__file__).parent / "frontend" / "request"
    found = []
    for name in ("pooled_request.py", "pooled_prompts.py"):
        for node in ast.walk(source_tree(folder / name)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"RequestError": 1, "ValueError": 0}.get(node.func.id)
                said = None if place is None else spelled_out(node.args[place])
                if said and said != "inputs[X]: X":
                    found.append(said if place else f"inputs[3]: {said}")
    assert len(found) > 15
    assert [said for said in found if code_of_message(said) != "INVALID_ARGUMENT"] == []
    for said in (UNUSABLE_VECTOR, f"inputs[3]: {UNUSABLE_VECTOR}", "inputs[3]: RuntimeError: x"):
        assert code_of_message(said) == "INTERNAL"
