"""Triton's side of the frontend: the only module besides `model.py` that sees `pb_utils`."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from inflight.config import ConfigError, EngineConfig
from inflight.frontend.errors import ErrorCode
from inflight.frontend.operator.metric_specs import MetricSpec
from inflight.frontend.operator.metrics import CreateMetric, Metrics, NoMetrics
from inflight.frontend.operator.request_spans import RequestSpans, make_provider
from inflight.frontend.output.heap_trim import HeapTrim
from inflight.frontend.output.interfaces import StatsSink
from inflight.frontend.output.tensor_cache import TensorCache
from inflight.frontend.request.contract import INPUTS, OUTPUTS, WireRequest
from inflight.frontend.request.trace_context import below_server_span
from inflight.vllm_options import BACKEND

__all__ = [
    "OutputLayout",
    "TritonResponder",
    "check_numpy",
    "checks_health",
    "complete_config",
    "create_metrics",
    "create_spans",
    "log",
    "metric_factory",
    "name_log",
    "output_layout",
    "read_request",
    "tensor_cache",
    "wants_metrics",
]

# `config.pbtxt` can declare a tensor with any type of the same kind as the wire contract's.
_KINDS = {
    **{f"TYPE_{sign}INT{bits}": "an integer type" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"TYPE_FP{bits}": "a floating-point type" for bits in (16, 32, 64)},
}

# Output -> its declared type and rank, if these differ from the contract's.
OutputLayout = dict[str, tuple[Any, int]]


# A response up to this size fits into nearly full shared memory, which grows by 1 MiB at a time.
_SMALL_BYTES = 64 * 1024
_heap = HeapTrim()


def _num_bytes(array: np.ndarray) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes


class TritonResponder:
    """A Triton response sender.  FINAL goes with the last response, or after it if that one is large.

    A response with FINAL closes the sender even if the shared memory has no room for it: no error
    response can follow, and the client waits forever (observed with Triton 24.10).

    The server deletes a request's response factory when FINAL arrives, and reads the factory when it
    is asked whether the request is cancelled.  If the two overlap, the server dies of SIGSEGV
    (Triton 24.10, `ProcessIsRequestCancelled`); a lock prevents that.

    Args:
        sender: Triton's, of one request.
        layout: types and ranks of outputs that `config.pbtxt` declares.
        wanted: names of the outputs that the client asked for, which Triton would drop after they were made; None: all.
        tensors: of the model instance; a new one by default.
    """

    def __init__(
        self,
        sender: Any,
        layout: OutputLayout | None = None,
        wanted: Collection[str] | None = None,
        tensors: TensorCache | None = None,
    ) -> None:
        self._sender = sender
        self._layout = layout or {}
        self._wanted = wanted
        self._tensors = tensors or tensor_cache()
        self._lock = threading.Lock()
        self._finished = False

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        """Send the outputs; raises if Triton does not accept them."""
        self.prepare(outputs, final)()

    def prepare(self, outputs: dict[str, np.ndarray], final: bool) -> Callable[[], None]:
        """Make the response; the function that is returned sends it."""
        tensors, num_bytes = [], 0
        for name, array in outputs.items():
            if self._wanted is None or name in self._wanted:
                num_bytes += _num_bytes(array)
                tensors.append(self._tensors.tensor(name, self._laid_out(name, array) if self._layout else array))
        return partial(self._send_response, pb_utils.InferenceResponse(tensors), num_bytes, final)

    def _send_response(self, response: Any, num_bytes: int, final: bool) -> None:
        whole = final and num_bytes <= _SMALL_BYTES
        if not whole:
            self._sender.send(response, flags=0)
            _heap.sent(num_bytes)
        if final:
            self._send_final(response if whole else None)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send an error; it is final.  It crosses the stub as a string of C, in UTF-8."""
        message = message.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._send_final(pb_utils.InferenceResponse(error=error))

    def is_cancelled(self) -> bool:
        """Ask the server process (about 0.15 ms), unless FINAL was sent."""
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def _laid_out(self, name: str, array: np.ndarray) -> np.ndarray:
        if name not in self._layout:
            return array
        dtype, rank = self._layout[name]
        return array.astype(dtype).reshape((1,) * (rank - array.ndim) + array.shape)

    def _send_final(self, response: Any) -> None:
        with self._lock:
            self._finished = True
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if response is None:
                self._sender.send(flags=final)
            else:
                self._sender.send(response, flags=final)


def tensor_cache() -> TensorCache:
    """A new cache of output tensors."""
    return TensorCache(pb_utils.Tensor)


def check_numpy() -> None:
    """Check that arrays pass through Triton's stub unchanged.

    A stub built for numpy 1 (that of 24.10 is) reads the item size from a field that numpy 2 has moved:
    every element of an array then reads as the first one, and strings crash the stub.

    Raises:
        ConfigError: they do not.
    """
    sent = np.arange(1, 4)
    # Through the stub's own DLPack capsule: it mistakes one of numpy 1 for its own, and crashes.
    received = pb_utils.Tensor.from_dlpack("check", pb_utils.Tensor("check", sent)).as_numpy()
    if received.tolist() != sent.tolist():
        raise ConfigError(
            f"this Triton's Python stub cannot read arrays of numpy {np.__version__}: "
            "install an older one where the stub runs (pip install 'numpy<2'), or use a newer Triton"
        )


def read_request(request: Any, with_trace: bool = False) -> WireRequest:
    """Inputs, parameters and timeout of a Triton request.

    Args:
        with_trace: make Triton's own span, if there is one, the parent of the request's.
    """
    parameters = json.loads(request.parameters() or "{}")
    if with_trace and (context := request.trace().get_context()):  # only with --trace-config mode=opentelemetry
        parameters = below_server_span(parameters, json.loads(context))
    return WireRequest(
        inputs={tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
        parameters=parameters,
        timeout_us=request.timeout(),
        request_id=request.request_id(),
    )


def complete_config(config: Any) -> Any:
    """Declare inputs, outputs, no Triton batching and the decoupled policy; keep the declarations of `config.pbtxt`.

    Types and dims of `config.pbtxt` override the contract's within the same kind of type (`output_layout`): clients
    of TensorRT-LLM send two dimensions, and a `seed` of UINT64.

    Raises:
        ConfigError: it declares an input or output with a data type of another kind than the wire contract's.
    """
    given = config.as_dict()
    inputs, outputs = ({tensor["name"]: tensor["data_type"] for tensor in given[kind]} for kind in ("input", "output"))
    for declared, specs in ((inputs, INPUTS), (outputs, OUTPUTS)):
        for name, data_type, _ in specs:
            given_type = declared.get(name, data_type)
            if _kind(given_type) != _kind(data_type):
                raise ConfigError(
                    f"config.pbtxt: {name} is declared as {given_type} but must be {_kind(data_type)}; "
                    "remove it: inputs and outputs are completed at load"
                )
    for spec in INPUTS:
        if spec.name not in inputs:
            config.add_input(
                {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims), "optional": True}
            )
    for spec in OUTPUTS:
        if spec.name not in outputs:
            config.add_output({"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)})
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config


def _kind(data_type: str) -> str:
    return _KINDS.get(data_type, data_type)


def output_layout(model_config: dict[str, Any]) -> OutputLayout:
    """Types and ranks of outputs that `config.pbtxt` declares differently from the contract."""
    contract = {spec.name: spec for spec in OUTPUTS}
    layout: OutputLayout = {}
    for tensor in model_config["output"]:
        spec, data_type, rank = contract.get(tensor["name"]), tensor["data_type"], len(tensor["dims"])
        if spec is not None and (data_type, rank) != (spec.data_type, len(spec.dims)):
            layout[spec.name] = pb_utils.triton_string_to_numpy(data_type), rank
    return layout


def _parameter(model_config: dict[str, Any], name: str) -> str:
    """A parameter of `config.pbtxt` in lower case; "" if it is missing."""
    return model_config.get("parameters", {}).get(name, {}).get("string_value", "").lower()


def checks_health(model_config: dict[str, Any]) -> bool:
    """True if `ENABLE_VLLM_HEALTH_CHECK`, a parameter of vllm_backend, is "true" in `config.pbtxt`."""
    return _parameter(model_config, "ENABLE_VLLM_HEALTH_CHECK") == "true"


_log_name = "inflight"


def log(level: str, line: str) -> None:
    """Write one line to the server's log; level is "info", "warn" or "error"."""
    write = {"info": pb_utils.Logger.log_info, "warn": pb_utils.Logger.log_warn, "error": pb_utils.Logger.log_error}
    write[level](f"[{_log_name}] {line}")


def name_log(backend: str) -> None:
    """Begin lines as vllm_backend does if this backend is in its place."""
    global _log_name
    _log_name = "vllm" if backend == BACKEND else "inflight"


def _never_deleted(triton_object: Any) -> Any:
    """Take a reference that is never released.

    In Triton's core, two families with one name, and two metrics with one name and equal labels, share a Prometheus
    object, which is freed with the first of them (24.10, and its main branch of today).  A model that is loaded
    again under traffic has such a pair until its old instance is gone, and the next use ends the server with
    SIGSEGV.  An object that outlives the interpreter is not deleted: each load leaves its names and labels behind
    in the server.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(triton_object))
    return triton_object


def create_spans(config: EngineConfig, sink: StatsSink, model: str) -> RequestSpans | None:
    """Exports spans of requests if `model.json` says where to; None: it does not.

    Raises:
        ConfigError: OpenTelemetry's SDK is missing.
    """
    if config.otlp_traces_endpoint is None:
        return None
    return RequestSpans(sink, make_provider(config), model, lambda line: log("error", line))


class _Metric:
    """The methods of a Triton metric."""

    def __init__(self, metric: Any) -> None:
        self.increment = metric.increment
        self.set = metric.set
        self.observe = metric.observe


def wants_metrics(model_config: dict[str, Any], config: EngineConfig) -> bool:
    """True unless `REPORT_CUSTOM_METRICS` is "false" in `config.pbtxt` or `disable_log_stats` is set.

    The parameter is vllm_backend's, where it must be "true" to turn metrics on.
    """
    return not config.disable_log_stats and _parameter(model_config, "REPORT_CUSTOM_METRICS") != "false"


def metric_factory(labels: dict[str, str]) -> CreateMetric:
    """A function that registers metrics with these labels, and their families, for good."""

    families: dict[str, Any] = {}

    def create(spec: MetricSpec, more: dict[str, str], buckets: list[float] | None) -> Any:
        family = families.get(spec.name)
        if family is None:
            kind = getattr(pb_utils.MetricFamily, spec.kind)
            family = _never_deleted(pb_utils.MetricFamily(name=spec.name, description=spec.description, kind=kind))
            families[spec.name] = family
        options: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
        return _Metric(_never_deleted(family.Metric(labels={**labels, **more}, **options)))

    return create


def create_metrics(labels: dict[str, str], max_model_len: int) -> Metrics | NoMetrics:
    """Register the metric families for good; `NoMetrics` if the server runs with `--allow-metrics=false`."""
    try:
        return Metrics(metric_factory(labels), max_model_len)
    except pb_utils.TritonModelException as error:
        if "metrics not supported" not in str(error).lower():
            raise
        return NoMetrics()
