"""The words of Triton and of our backend, and the exceptions they become."""

from __future__ import annotations

import pytest

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
    (UnavailableError, "the engine is being restarted and 8 requests (max_queue_size) wait for it"),
    (UnavailableError, "the model is being unloaded"),
    (UnavailableError, "Request for unknown model: 'demo' has no available versions"),
    (UnavailableError, "Exceeds maximum queue size"),
    (DeadlineExceededError, "deadline exceeded: the request's timeout of 0.5 s ran out after 3 output tokens"),
    (DeadlineExceededError, "Request timeout expired"),
    (RequestCancelledError, "Request was cancelled"),
    (InvalidRequestError, "Request for unknown model: 'x' is not found"),
    (InvalidRequestError, "temperature=-1 is out of range: allowed is [0.0, 100.0]"),
    (InvalidRequestError, "request_priority='x': allowed is an integer in [-2147483648, 2147483647]"),
    (InvalidRequestError, "timeout=-5: allowed is a number of microseconds, 0 for none"),
    (InvalidRequestError, "the prompt has 0 tokens: allowed are 1 to 63 (max_model_len=64 less one output token)"),
    (InvalidRequestError, "no prompt, or an empty one, came: give exactly one of text_input, input_ids, messages"),
    (InvalidRequestError, "sampling_parameters: not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    (InvalidRequestError, "text_input is not valid UTF-8: byte 0xff at 0"),
    (InvalidRequestError, "unexpected inference input 'foo' for model 'demo'"),
    (ServerError, "KeyError: 'x'"),
    (ServerError, "something nobody has seen before"),
]


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_messages_find_their_exception(kind: type[Exception], message: str) -> None:
    error = error_for(code_of_message(message), message)
    assert type(error) is kind
    assert error.message == message == str(error)


def test_an_unknown_message_takes_the_default() -> None:
    assert code_of_message("hm", default="NOT_FOUND") == "NOT_FOUND"
