"""The bridge with fakes of Triton's objects (tests/e2e uses the real ones)."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import types

import numpy as np
import pytest

from inflight.config import ConfigError
from inflight.frontend.operator.metric_specs import MetricSpec


@pytest.fixture
def bridge(monkeypatch):
    pb_utils = types.ModuleType("triton_python_backend_utils")
    pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    pb_utils.Tensor = lambda name, array: (name, array)
    pb_utils.InferenceResponse = lambda tensors=None, error=None: (tensors, error)
    pb_utils.TritonError = lambda message, code: (message, code)
    pb_utils.TritonError.CANCELLED = 7
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    monkeypatch.delitem(sys.modules, "inflight.frontend.triton", raising=False)
    yield importlib.import_module("inflight.frontend.triton")
    sys.modules.pop("inflight.frontend.triton", None)


@pytest.mark.parametrize("stride", [8, 0])
def test_a_stub_that_cannot_read_this_numpy_is_rejected(bridge, stride):
    """Under numpy 2, a stub built for numpy 1 creates arrays without strides: every element is the first one."""

    class Tensor:
        def __init__(self, name, array):
            self.as_numpy = lambda: array

        @classmethod
        def from_dlpack(cls, name, tensor):
            array = tensor.as_numpy()
            return cls(name, np.lib.stride_tricks.as_strided(array, array.shape, (stride,)))

    bridge.pb_utils.Tensor = Tensor
    if stride:
        bridge.check_numpy()
    else:
        with pytest.raises(ConfigError, match=r"numpy \S+: install an older one .*pip install 'numpy<2'"):
            bridge.check_numpy()


class Server:
    """The server's side of a request, whose response factory is deleted when FINAL arrives."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.flags: list[int] = []
        self.asked_after_final = False

    def is_cancelled(self) -> bool:
        self.asked.set()
        assert self.answer.wait(10)
        self.asked_after_final |= 1 in self.flags
        return False

    def send(self, response=None, flags: int = 0) -> None:
        self.flags.append(flags)


class FullServer(Server):
    """Has no shared memory for large responses; like Triton, a FINAL that failed closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.error: str | None = None

    def send(self, response=None, flags: int = 0) -> None:
        if 1 in self.flags:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        super().send(response, flags)
        tensors, self.error = response or (None, None)
        if sum(len(value) for _, array in tensors or () for value in array) > 2**20:
            raise RuntimeError("Failed to increase the shared memory pool size")


@pytest.mark.parametrize("end", ["send", "fail"])
def test_final_waits_for_a_cancellation_check_in_flight(bridge, end):
    server = Server()
    responder = bridge.TritonResponder(server)
    question = threading.Thread(target=responder.is_cancelled)
    question.start()
    assert server.asked.wait(10)
    outputs = {"text_output": np.array([b"x"], dtype=np.object_)}
    responder.send(outputs, final=False)  # the factory stays: nothing to wait for
    final = threading.Thread(
        target=lambda: responder.send(outputs, True) if end == "send" else responder.fail("CANCELLED", "gone")
    )
    final.start()
    final.join(0.1)
    assert final.is_alive()
    assert server.flags == [0]
    server.answer.set()
    question.join(10)
    final.join(10)
    assert server.flags == [0, 1]
    assert not server.asked_after_final


def test_no_cancellation_check_follows_final(bridge):
    server = Server()
    server.answer.set()
    responder = bridge.TritonResponder(server)
    responder.fail("CANCELLED", "gone")
    assert responder.is_cancelled() is False
    assert not server.asked.is_set()


def test_after_a_response_too_large_for_the_shared_memory_the_error_still_gets_through(bridge):
    server = FullServer()
    responder = bridge.TritonResponder(server)
    with pytest.raises(RuntimeError, match="shared memory"):
        responder.send({"text_output": np.array([b"x" * 2**21], dtype=np.object_)}, final=True)
    responder.fail("CANCELLED", "no room")
    assert server.error == ("no room", 7)
    assert server.flags == [0, 1]


def test_an_error_is_read_to_its_end_whatever_a_client_has_written(bridge):
    """The stub passes it on as a string of C, in UTF-8."""
    server = FullServer()
    bridge.TritonResponder(server).fail("CANCELLED", "LoRA \0\ud800 is not supported")
    assert server.error == ("LoRA \\x00\\ud800 is not supported", 7)


def test_final_follows_a_large_response_and_goes_with_a_small_one(bridge):
    for size, flags in ((10, [1]), (2**20, [0, 1])):
        server = Server()
        bridge.TritonResponder(server).send({"token_ids": np.zeros(size // 8 + 1, dtype=np.int64)}, final=True)
        assert server.flags == flags


def test_outputs_are_sent_in_the_declared_type_and_rank(bridge):
    sent = []
    server = types.SimpleNamespace(send=lambda response, flags: sent.append(dict(response[0])))
    bridge.pb_utils.triton_string_to_numpy = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}.get
    layout = bridge.output_layout(
        {
            "output": [
                {"name": "num_input_tokens", "data_type": "TYPE_INT32", "dims": ["1", "1"]},
                {"name": "output_log_probs", "data_type": "TYPE_FP32", "dims": ["1", "-1", "-1"]},
                {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": ["-1"]},
                {"name": "of another backend", "data_type": "TYPE_FP32", "dims": ["1", "1"]},
            ]
        }
    )
    assert set(layout) == {"num_input_tokens", "output_log_probs"}, (
        "what is declared as the contract does is sent as is"
    )
    outputs = {
        "num_input_tokens": np.array([5], dtype=np.uint32),
        "output_log_probs": np.zeros((1, 3), dtype=np.float32),
        "cum_log_probs": np.zeros(1, dtype=np.float32),
    }
    bridge.TritonResponder(server, layout).send(outputs, final=False)
    found = {name: (array.dtype, array.shape) for name, array in sent[0].items()}
    assert found == {
        "num_input_tokens": (np.int32, (1, 1)),
        "output_log_probs": (np.float32, (1, 1, 3)),
        "cum_log_probs": (np.float32, (1,)),
    }


def test_a_metric_and_its_family_are_never_deleted(bridge):
    """Deleting one of two that Triton made of the same name and labels leaves the other one dangling."""
    deleted = []

    class Triton:
        def __init__(self, **options):
            self.name = options.get("name", "metric")

        def __del__(self):
            deleted.append(self.name)

        def Metric(self, labels):
            assert labels == {"model": "m"}
            return Triton()

        def increment(self, value): ...
        def set(self, value): ...
        def observe(self, value): ...

    bridge.pb_utils.MetricFamily = Triton
    Triton.GAUGE = 1
    bridge.pb_utils.TritonModelException = RuntimeError
    made = []
    bridge.Metrics = lambda create, max_model_len: made.append(create(MetricSpec("g", "GAUGE", ""), {}, None))
    bridge.create_metrics({"model": "m"}, 100)
    made.clear()
    gc.collect()
    assert deleted == []


class ModelConfig:
    """Triton's object for a `config.pbtxt`."""

    def __init__(self, **declared: str) -> None:
        self.input = [{"name": name, "data_type": data_type} for name, data_type in declared.items()]
        self.output: list[dict] = []

    def as_dict(self) -> dict:
        return {"input": self.input, "output": self.output}

    def add_input(self, tensor: dict) -> None:
        self.input.append(tensor)

    def add_output(self, tensor: dict) -> None:
        self.output.append(tensor)

    def set_max_batch_size(self, size: int) -> None:
        assert size == 0

    def set_model_transaction_policy(self, policy: dict) -> None:
        assert policy == {"decoupled": True}


def test_declarations_in_config_pbtxt_are_kept_if_they_fit_the_contract(bridge):
    config = bridge.complete_config(ModelConfig(text_input="TYPE_STRING"))
    names = [tensor["name"] for tensor in config.input]
    assert names.count("text_input") == 1 and "stream" in names and config.output
    with pytest.raises(ConfigError, match="text_input is declared as TYPE_INT32 but must be TYPE_STRING; remove it"):
        bridge.complete_config(ModelConfig(text_input="TYPE_INT32"))


@pytest.mark.parametrize(
    ("name", "data_type", "must_be"),
    [
        ("seed", "TYPE_UINT64", None),
        ("max_tokens", "TYPE_UINT32", None),
        ("temperature", "TYPE_FP16", None),
        ("seed", "TYPE_FP32", "an integer type"),
        ("temperature", "TYPE_INT32", "a floating-point type"),
        ("stream", "TYPE_STRING", "TYPE_BOOL"),
    ],
)
def test_a_declared_type_decides_within_its_kind(bridge, name, data_type, must_be):
    config = ModelConfig(**{name: data_type})
    if must_be is None:
        (declared,) = [tensor for tensor in bridge.complete_config(config).input if tensor["name"] == name]
        assert declared["data_type"] == data_type
    else:
        with pytest.raises(ConfigError, match=f"{name} is declared as {data_type} but must be {must_be}; remove it"):
            bridge.complete_config(config)


TRACE, OTHER = "a" * 32, "c" * 32


class Request:
    """A Triton request with a client's context; `context` is that of Triton's own span, "" or None without one."""

    def __init__(self, context: str | None) -> None:
        self._context = context

    def inputs(self) -> list:
        return []

    def parameters(self) -> str:
        return f'{{"Traceparent": "00-{TRACE}-{"b" * 16}-01", "temperature": 0}}'

    def timeout(self) -> int:
        return 0

    def request_id(self) -> str:
        return ""

    def trace(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(get_context=lambda: self._context)


def test_tritons_own_span_is_the_parent_of_a_requests_within_the_clients_trace(bridge):
    context = f'{{"traceparent": "00-{TRACE}-{"d" * 16}-01", "tracestate": ""}}'
    lost = f'{{"traceparent": "00-{OTHER}-{"d" * 16}-01", "tracestate": ""}}'
    assert bridge.read_request(Request(context), True).parameters == {
        "traceparent": f"00-{TRACE}-{'d' * 16}-01",
        "tracestate": "",
        "temperature": 0,
    }
    for request, with_trace in [(lost, True), ("", True), (None, True), ("{}", True), (context, False)]:
        parameters = bridge.read_request(Request(request), with_trace).parameters
        assert parameters == {"Traceparent": f"00-{TRACE}-{'b' * 16}-01", "temperature": 0}


def test_only_outputs_that_the_client_asked_for_are_made(bridge):
    made, sent = [], []
    bridge.pb_utils.Tensor = lambda name, array: made.append(name) or (name, array)
    server = types.SimpleNamespace(send=lambda response, flags: sent.append(dict(response[0])))
    outputs = {name: np.array([b"x"], dtype=np.object_) for name in ("text_output", "finish_reason", "logprobs")}
    bridge.TritonResponder(server, wanted={"text_output", "token_ids"}).send(outputs, final=False)
    assert (made, [*sent[0]]) == (["text_output"], ["text_output"])
    bridge.TritonResponder(server).send(outputs, final=False)
    assert [*sent[1]] == [*outputs]


def test_responders_of_a_model_share_tensors_that_repeat(bridge):
    sent = []
    server = types.SimpleNamespace(send=lambda response, flags: sent.append(dict(response[0])))
    tensors = bridge.tensor_cache()
    for _ in range(2):
        outputs = {"text_output": np.array([b"x"], dtype=np.object_), "token_counts": np.array([1], dtype=np.uint32)}
        bridge.TritonResponder(server, tensors=tensors).send(outputs, final=False)
    assert sent[0]["token_counts"] is sent[1]["token_counts"]
    assert sent[0]["text_output"] is not sent[1]["text_output"]
