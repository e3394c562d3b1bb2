"""Triton's entry point: `TritonPythonModel` of the `inflight` backend.

Triton runs this file in its stub process.  The package is the folder that contains this file.  It can be
copied to Triton's backends folder without being installed, and under any name: a repository that says
`backend: "vllm"` finds it as `backends/vllm`.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

if "inflight" not in sys.modules:
    # Not through sys.path: another package can have the name of the folder.
    _FOLDER = Path(__file__).resolve().parent
    _SPEC = importlib.util.spec_from_file_location(
        "inflight", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert _SPEC is not None and _SPEC.loader is not None
    sys.modules["inflight"] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules["inflight"])

import triton_python_backend_utils as pb_utils

from inflight.config import ConfigError, EngineConfig
from inflight.frontend import triton as bridge
from inflight.frontend.adapters.loader import AdapterLoader
from inflight.frontend.adapters.peers import AdapterPeers
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.engine_client.device_placement import engine_rank, num_engines, num_sharing, placement
from inflight.frontend.engine_client.shared_engine import find_group
from inflight.frontend.engine_client.supervisor import Supervisor
from inflight.frontend.errors import RequestError
from inflight.frontend.lifecycle.checkpoint_id import checkpoint_id
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.lifecycle.inherited_sockets import close_inherited_sockets
from inflight.frontend.lifecycle.instance_registry import RegistryEntry
from inflight.frontend.lifecycle.model_json_trust import check_model_json_trust
from inflight.frontend.lifecycle.server_probe import ServerProbe
from inflight.frontend.lifecycle.stub_beat import StubBeat
from inflight.frontend.lifecycle.unload_detector import UnloadDetector
from inflight.frontend.operator.adapter_control import adapter_controls
from inflight.frontend.operator.adapter_metrics import AdapterMetrics
from inflight.frontend.operator.admin_key import AdminKey
from inflight.frontend.operator.control import Control, control_of, relay
from inflight.frontend.operator.counters import Counters
from inflight.frontend.operator.metrics import NoMetrics
from inflight.frontend.operator.status import InstanceIdentity, InstanceStatus
from inflight.frontend.operator.tokenize_api import TokenizeApi, facts
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.output.pacing import pacing_for
from inflight.frontend.output.pooled_group import PooledGroups
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.pooled_prompts import PooledPrompts, most_inputs
from inflight.frontend.request.pooled_request import PooledRequestReader
from inflight.frontend.request.tokenize_pool import TokenizePool
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.frontend.text.tokenizer_info import tokenizer_info
from inflight.model_json import read_model_json

_DRAIN = "drain"  # a message between instances


class TritonPythonModel:
    """One model instance: a frontend in this process, and an engine process, which instances on one device share."""

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Declare the wire contract, so that `config.pbtxt` need not."""
        return bridge.complete_config(config)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and start the engine process; Triton shows an exception as the load error."""
        bridge.check_numpy()
        close_inherited_sockets()
        if os.environ.pop("INFLIGHT_SERVER_MALLOC", None):  # the launcher's options for the server
            os.environ.pop("GLIBC_TUNABLES", None)  # the engine keeps its large buffers
        model_dir = Path(pb_utils.get_model_dir()).resolve()
        model_config = json.loads(args["model_config"])
        bridge.name_log(model_config["backend"])
        config = read_model_json(model_dir / "model.json", model_config["backend"])
        check_model_json_trust(config, model_dir, args["model_name"])
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        rank = engine_rank(model_config, kind, device_id)
        visible, engines = os.environ.get("CUDA_VISIBLE_DEVICES"), num_engines(model_config)
        config, env = placement(config, kind, device_id, visible, rank, engines)
        if config.download_dir is not None:  # before the hub's library is imported, here and in the engine process
            os.environ["HF_HUB_CACHE"] = config.download_dir
        self._adapter_metrics: AdapterMetrics | None = None
        self._adapters = AdapterLoader(config, model_dir, bridge.log, self._adapter_loaded)
        self._group = find_group(config, env, args, model_dir)
        self._supervisor = Supervisor(
            config, bridge.log, env=env, launch=None if self._group is None else self._group.launch
        )
        self._supervisor.begin()  # the engine loads the weights while this process loads the tokenizer
        try:
            tokenizer = self._load_texts(config)
        except BaseException:
            self._supervisor.stop()
            raise
        ready = self._supervisor.wait_until_ready()
        number = self._group.number if self._group is not None else 0
        bridge.log(
            "info",
            f"{args['model_name']}: {ready.dtype} on {ready.device}, max_model_len={ready.max_model_len}, "
            f"{ready.num_blocks} KV blocks of {ready.block_size} tokens, loaded in {ready.load_seconds:.1f} s",
        )
        content = checkpoint_id(config.model, config.revision)
        parser = RequestParser(
            config,
            tokenizer,
            self._chat,
            ready.max_model_len,
            ready.vocab_size,
            ready.eos_token_ids,
            number,
            ready.pooler.generates,
            self._adapters.registry,
            content,
        )
        prompts = PooledPrompts(
            ready.pooler,
            tokenizer,
            ready.max_model_len,
            ready.vocab_size,
            most_inputs(config),
            config.max_input_bytes,
        )
        pooled_reader = PooledRequestReader(parser, prompts, args["model_name"])
        self._tokenize_api = TokenizeApi(
            facts(content, ready, self._chat, tokenizer),
            tokenizer_info(config.tokenizer_source, config.tokenizer_source_revision, self._chat.text),
            tokenizer,
            parser.prompts,
            parser.limits,
            self._adapters.registry.ids if config.enable_lora else None,
        )
        self._metrics = (
            bridge.create_metrics({"model": args["model_name"], "version": args["model_version"]}, ready.max_model_len)
            if bridge.wants_metrics(model_config, config)
            else NoMetrics()
        )
        counters = Counters(self._metrics)
        self._spans = bridge.create_spans(config, counters, args["model_name"])
        self._output_processor = OutputProcessor(
            tokenizer,
            self._supervisor,
            self._spans or counters,
            lambda line: bridge.log("error", line),
            max_sequences=config.max_queue_size and config.max_num_seqs + config.max_queue_size,
            interval=1 if config.stream_interval == "auto" else config.stream_interval,
            log_info=lambda line: bridge.log("info", line),
            pacing=pacing_for(config, ready.device),
            max_replays=config.max_replays,
            number=number,
        )
        self._tokenize_pool = TokenizePool(
            parser.parse,
            self._output_processor,
            lambda line: bridge.log("error", line),
            open_pooled=PooledGroups(pooled_reader.read, self._output_processor.open).open,
        )
        self._metrics.engine_ready(ready, again=False)
        self._layout = bridge.output_layout(model_config)
        self._tensors = bridge.tensor_cache()
        self._checks_health = bridge.checks_health(model_config)
        self._admin = AdminKey.from_environment(os.environ)
        identity = InstanceIdentity(
            args["model_name"], args["model_version"], args["model_instance_name"], config.model
        )
        self._registry_entry = RegistryEntry(f"{identity.model} {identity.version} {identity.instance}")
        self._drain = Drain(self._output_processor, config.drain_timeout, bridge.log, self._registry_entry.set)
        self._status = InstanceStatus(
            identity, ready, self._supervisor, self._output_processor, self._drain, counters, lambda: counters.replays
        )
        self._control = Control(
            self._supervisor.ask,
            self._status,
            self._drain,
            self._drain_others,
            TokenizeApi.names,
            adapter_controls(self._adapters),
        )
        self._metrics.start()
        self._output_processor.start()
        self._tokenize_pool.start()
        self._beat = StubBeat(self._registry_entry.beat, self._output_processor.run)
        self._beat.start()
        self._status.start()
        probe = ServerProbe(identity.model, identity.version, os.getppid())
        self._unload_detector = UnloadDetector(
            self._drain,
            self._registry_entry,
            lambda: self._output_processor.num_open,
            lambda: self._supervisor.can_serve,
            probe.is_ready,
        )
        self._unload_detector.start()
        self._supervisor.connect(self._output_processor)
        self._start_adapters(config, args, model_config, ready.device)

    def _start_adapters(
        self, config: EngineConfig, args: dict[str, str], model_config: dict[str, Any], device_name: str
    ) -> None:
        """Let the engine load the model's adapters; they can be loaded and unloaded from then on."""
        device = int(args["model_instance_device_id"])
        others = num_sharing(model_config, args["model_instance_kind"], device) - 1
        self._peers = AdapterPeers(self._adapters.follow, self._tell_others, others)
        if self._group is not None:
            self._adapters.tell_others = self._peers.tell
            self._group.hear(self._told)
        if not config.enable_lora:
            return
        try:
            self._adapters.start(self._supervisor.ask)
        except ConfigError:
            self.finalize()
            raise
        self._peers.start()
        if not isinstance(self._metrics, NoMetrics):
            labels = {"model": args["model_name"], "version": args["model_version"]}
            self._adapter_metrics = AdapterMetrics(
                bridge.metric_factory(labels),
                config.num_running_adapters(device_name),
                self._output_processor.open_streams,
                tells_sets=self._group is None or self._group.number == 0,
            )
            self._adapter_metrics.start()

    def _load_texts(self, config: EngineConfig) -> Tokenizer:
        """The chat template, and the tokenizer."""
        source, revision = config.tokenizer_source, config.tokenizer_source_revision
        self._chat = ChatTemplate.load(
            source,
            revision=revision,
            override=config.chat_template,
            seconds=config.chat_template_timeout,
            trusts_requests=config.trust_request_chat_template,
        )
        tokenizer = Tokenizer.load(
            source,
            revision=revision,
            trust_remote_code=config.trust_remote_code,
            required=config.tokenizer is not None,
        )
        self._chat.check()
        return tokenizer

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; the sender thread sends every response.  Never raises."""
        for request in requests:
            responder = bridge.TritonResponder(
                request.get_response_sender(), self._layout, request.requested_output_names(), self._tensors
            )
            with self._tokenize_pool.errors_to(responder):
                wire = bridge.read_request(request, self._spans is not None)
                self._admin.check(wire)
                answer = self._control.answer(wire)
                if answer is not None:
                    relay(answer, self._output_processor, responder)
                    continue
                if control_of(wire) is not None:
                    self._tokenize_pool.take(wire, responder, self._tokenize_api.answer)
                    continue
                if self._checks_health:
                    self._check_health()
                self._tokenize_pool.take(wire, responder)

    def is_ready(self) -> bool:
        """Whether a new request would be served; Triton asks from release 26.03 on."""
        return self._supervisor.can_serve and not self._drain.draining

    def _drain_others(self) -> None:
        self._tell_others(_DRAIN)

    def _tell_others(self, text: str) -> None:
        if self._group is not None:
            self._group.tell(text)

    def _adapter_loaded(self, outcome: str, seconds: float) -> None:
        if self._adapter_metrics is not None:
            self._adapter_metrics.loaded(outcome, seconds)

    def _told(self, text: str) -> None:
        """A message of another instance that shares the engine."""
        if text == _DRAIN:
            self._drain.begin("a control request to another instance")
        else:
            self._peers.told(text)

    def _check_health(self) -> None:
        """Refuse a request that would wait for an engine, as vllm_backend does with the parameter.

        vllm_backend also unloads the model.  A model that unloads itself can end Triton 24.10 with SIGSEGV (observed),
        and the engine process is restarted here: the model stays loaded, and serves again when the engine is up.

        Raises:
            RequestError: UNAVAILABLE; the engine process is not up.
        """
        if self._supervisor.pid is None:
            reason = self._supervisor.refusal or "the engine process is being restarted"
            raise RequestError("UNAVAILABLE", f"Model is unavailable due to unhealthy engine: {reason}")

    def finalize(self) -> None:
        """End the engine process and the threads."""
        self._unload_detector.stop()
        self._drain.stop()
        self._chat.close()  # first: the pool waits for chats that it renders
        self._tokenize_pool.stop()
        self._supervisor.stop()  # before the streams stop: they send the errors of open questions to their clients
        if self._group is not None:
            self._group.leave()
        self._status.stop()
        self._beat.stop()
        self._registry_entry.close()
        self._output_processor.stop("the model is being unloaded")
        self._peers.stop()
        if self._adapter_metrics is not None:
            self._adapter_metrics.stop()
        self._adapters.stop()
        self._tensors.clear()
        self._metrics.stop()
        if self._spans is not None:
            self._spans.stop()
        # Response senders access the stub when they are garbage-collected: that must happen now, not at
        # interpreter exit, when the stub has closed its shared memory.  Metrics are never collected.
        self.__dict__.clear()
        gc.collect()
