"""Triton's entry point: `TritonPythonModel` of the `inflight` backend.

Triton runs this file in its stub process.  The package is the folder the file lies in, which may
have been copied to Triton's backends folder without being installed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

_PARENT = str(Path(__file__).resolve().parent.parent)
if _PARENT not in sys.path:
    sys.path.insert(0, _PARENT)

import triton_python_backend_utils as pb_utils  # noqa: E402

from inflight.config import EngineConfig  # noqa: E402
from inflight.frontend import triton_bridge as bridge  # noqa: E402
from inflight.frontend.chat import ChatTemplate  # noqa: E402
from inflight.frontend.contract import RequestParser  # noqa: E402
from inflight.frontend.control import asks_for_trace  # noqa: E402
from inflight.frontend.errors import RequestError  # noqa: E402
from inflight.frontend.metrics import NoMetrics  # noqa: E402
from inflight.frontend.placement import placement  # noqa: E402
from inflight.frontend.streams import Streams  # noqa: E402
from inflight.frontend.supervisor import Supervisor  # noqa: E402
from inflight.frontend.text import Tokenizer  # noqa: E402


class TritonPythonModel:
    """One model instance: a frontend here and an engine process of its own."""

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Declare the wire contract, so that `config.pbtxt` need not."""
        return bridge.complete_config(config)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and start the engine; raises what Triton shows as the load error."""
        bridge.check_numpy()
        model_dir = Path(pb_utils.get_model_dir()).resolve()
        model_config = json.loads(args["model_config"])
        config, env = placement(
            EngineConfig.from_file(model_dir / "model.json"),
            args["model_instance_kind"],
            int(args["model_instance_device_id"]),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        source, revision = config.tokenizer_source, config.revision
        tokenizer = Tokenizer.load(source, revision=revision, trust_remote_code=config.trust_remote_code)
        chat = ChatTemplate.load(source, revision=revision, override=config.chat_template)

        self._supervisor = Supervisor(config, bridge.log, env=env)
        ready = self._supervisor.start()
        bridge.log(
            "info",
            f"{args['model_name']}: {ready.dtype} on {ready.device}, max_model_len={ready.max_model_len}, "
            f"{ready.num_blocks} KV blocks of {ready.block_size} tokens, loaded in {ready.load_seconds:.1f} s",
        )
        self._parser = RequestParser(config, tokenizer, chat, ready.max_model_len, ready.vocab_size)
        self._metrics = (
            bridge.create_metrics({"model": args["model_name"], "version": args["model_version"]}, ready.max_model_len)
            if bridge.wants_metrics(model_config, config)
            else NoMetrics()
        )
        most = config.max_queue_size and config.max_num_seqs + config.max_queue_size
        self._streams = Streams(
            tokenizer,
            self._supervisor,
            self._metrics,
            lambda line: bridge.log("error", line),
            max_sequences=most,
            interval=config.stream_interval,
        )
        self._metrics.start()
        self._streams.start()
        self._supervisor.connect(self._streams)

    def execute(self, requests: list[Any]) -> None:
        """Take requests; every answer goes through the streams' sender.  Never raises."""
        for request in requests:
            responder = bridge.TritonResponder(request.get_response_sender())
            try:
                wire = bridge.read_request(request)
                if asks_for_trace(wire):
                    self._streams.dump_trace(responder)
                else:
                    self._streams.open(self._parser.parse(wire), responder)
            except RequestError as error:
                self._streams.reject(responder, error)
            except BaseException as error:  # a bug, or a panic of the tokenizer, must not take the other requests along
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                message = f"{type(error).__name__}: {error}"
                bridge.log("error", f"while reading a request: {message}")
                self._streams.reject(responder, RequestError("INTERNAL", message))

    def finalize(self) -> None:
        """End the engine process and the threads."""
        self._streams.stop("the model is being unloaded")
        self._supervisor.stop()
        self._metrics.stop()
        # Triton's metrics and senders reach into the stub when they are collected: that must be now,
        # not when the interpreter goes down after the stub has closed its shared memory.
        self.__dict__.clear()
        gc.collect()
