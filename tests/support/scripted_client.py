"""A fake `inflight_client.AsyncClient` that answers by a script, and records its requests.

Its streams accumulate, cancel and fail as `AsyncStream` does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from inflight_client import ChoiceDelta, DeadlineExceededError, InvalidRequestError, RequestCancelledError, StreamChunk
from inflight_client.pooling import Pooled
from inflight_client.request import GenerationRequest
from inflight_client.results import GenerationResult, ResultBuilder

INPUTS = ("text_input", "messages", "input_ids", "pooling", "stream", "sampling_parameters", "resume_token_ids")

# Items of a script: a chunk, seconds to wait, an event to wait for, or an error to raise.
# A request with `pooling` has no chunks: its response is a `Pooled`.
Script = Iterable[StreamChunk | Pooled | float | asyncio.Event | Exception]


def text(*parts: str, finish: str | None = "stop", prompt: int = 3, index: int = 0, n: int = 1) -> list[StreamChunk]:
    """Chunks with one token a part, the last with the finish reason; the other choices of `n` get nothing."""
    chunks = []
    for number, part in enumerate(parts):
        reason = finish if number == len(parts) - 1 else None
        deltas = [ChoiceDelta(index=i, text="") for i in range(n)]
        deltas[index] = ChoiceDelta(index=index, text=part, token_ids=[7], num_tokens=1, finish_reason=reason)
        chunks.append(StreamChunk(choices=deltas, num_input_tokens=prompt))
    return chunks


LABELS = ["bad", "good"]


def vectors(request: GenerationRequest, size: int = 4) -> list[Pooled | Exception]:
    """The response to a request with `pooling`; a character is a token.

    Embeddings begin with the input's length, scores depend on that of the document, and classes on whether there is a
    "g".  An input with a NUL is refused as one that is too long.
    """
    pooling = request.pooling
    assert pooling is not None
    rows, counts = [], []
    for i, one in enumerate(pooling["inputs"]):
        text = "".join(one) if pooling["task"] == "score" else one
        if "\x00" in text:
            return [InvalidRequestError(f"inputs[{i}]: a prompt of 5000 tokens: it must be 1 to 2048 long")]
        limit = pooling.get("truncate_prompt_tokens") or -1
        counts.append(len(text) if limit == -1 else min(len(text), limit))
        if pooling["task"] == "embed":
            rows.append([float(len(text)), 0.1, -0.5, 1e-8, *[0.25] * (size - 4)][: pooling.get("dimensions") or size])
        elif pooling["task"] == "score":
            rows.append([len(one[1]) / 100])
        else:
            rows.append([0.25, 0.75] if "g" in text else [0.75, 0.25])
    labels = LABELS if pooling["task"] == "classify" else []
    return [Pooled(np.array(rows, np.float32), np.array(counts, np.int32), labels)]


def stats(generation_tokens: int = 0, engine: bool = True, **changes: Any) -> dict[str, Any]:
    """The parts of an answer to the control request "stats" that the gateway reads, and some that it must not show."""
    load = {
        "running": 3,
        "waiting": 1,
        "blocks_used": 120,
        "blocks_free": 392,
        "prefix_queries_total": 1000,
        "prefix_hits_total": 620,
    }
    return {
        "state": "ready",
        "reason": None,
        "instance": "demo_0_0",
        "checkpoint": "/secret/path",
        "frontend": {"pid": 4711, "generation_tokens": generation_tokens},
        "engine": {"pid": 4712, "load": load, "tenants": {"secret-tenant": {"running": 1}}} if engine else None,
        **changes,
    }


class ScriptedStream:
    """One request's stream."""

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        self.resumptions = 0
        self.pooled: Pooled | None = None
        self.adapter_digest: str | None = None
        self.cancelled = asyncio.Event()
        self._script = script
        ids = request.input_ids
        self._builder = ResultBuilder(request.n, None if ids is None else len(ids))
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._chunks

    async def _run(self) -> AsyncIterator[StreamChunk]:
        try:
            for item in self._script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Pooled):
                    self.pooled = item
                    continue
                if isinstance(item, StreamChunk):
                    self._builder.add(item)
                    yield item
                    continue
                waits = asyncio.sleep(item) if isinstance(item, float) else item.wait()
                await self._unless_cancelled(waits)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _unless_cancelled(self, waits: Any) -> None:
        tasks = {asyncio.ensure_future(waits), asyncio.ensure_future(self.cancelled.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self.cancelled.is_set():
            raise RequestCancelledError("the request was cancelled by this client")

    def cancel(self) -> None:
        self.cancelled.set()

    @property
    def num_input_tokens(self) -> int | None:
        return self._builder.num_input_tokens

    def rest(self) -> GenerationRequest:
        found = [choice.token_ids for choice in self.result().choices]
        seeded = {"seed": 1234, **self.request.sampling}
        return self.request.changed(
            sampling=seeded, resume_token_ids=found if any(found) else None, adapter_digest=self.adapter_digest
        )

    def result(self) -> GenerationResult:
        return self._builder.build(self.request.request_id, self.request.model, 1, 0.0)


class ScriptedClient:
    """Answers each request with the result of `answer`.

    Attributes:
        streams: of all requests so far.
        questions: options of all calls of `tokenize`.
        admin_keys: of all questions for the state, and of all `changes` of adapters.
        inputs: names of the inputs of each model.
        info: the result of `model_info`.
        stats: the answer to the control request "stats", or the error that it raises.
        is_live: the server answers.
    """

    def __init__(self, answer: Callable[[GenerationRequest], Script], models: Iterable[str] = ("demo",)) -> None:
        self.answer = answer
        self.inputs: dict[str, tuple[str, ...]] = dict.fromkeys(models, INPUTS)
        self.info: dict[str, Any] = {
            "checkpoint_id": "c0ffee",
            "version": "0.1.0",
            "max_model_len": 2048,
            "tool_format": None,
            "has_chat_template": True,
            "reasoning_tags": None,
            "reasoning_opened": False,
            "special_tokens": {},
        }
        self.streams: list[ScriptedStream] = []
        self.questions: list[dict[str, Any]] = []
        self.stats: dict[str, Any] | Exception = stats()
        self.admin_keys: list[str | None] = []
        self.changes: list[tuple[str, dict[str, Any]]] = []
        self.is_live = True
        self.is_ready = True
        self.is_silent = False  # as a model whose stub process is stopped

    @property
    def requests(self) -> list[GenerationRequest]:
        return [stream.request for stream in self.streams]

    def stream(self, prompt: Any = None, *, messages: Any = None, input_ids: Any = None, **options: Any) -> Any:
        return self.send(GenerationRequest.build(prompt, messages, input_ids, options, model="", timeout=None))  # type: ignore[arg-type]

    def send(self, request: GenerationRequest) -> ScriptedStream:
        self.streams.append(ScriptedStream(request, self.answer(request)))
        return self.streams[-1]

    async def repository_index(self) -> list[dict[str, Any]]:
        return [{"name": name, "state": "READY"} for name in self.inputs]

    async def metadata(self, model: str) -> dict[str, Any]:
        if model not in self.inputs:
            raise InvalidRequestError(f"Request for unknown model: '{model}' is not found", code="NOT_FOUND")
        inputs = [{"name": name} for name in self.inputs[model]]
        return {"name": model, "inputs": inputs, "outputs": [{"name": "text_output"}]}

    async def model_info(self, model: str, timeout: float = 60.0) -> dict[str, Any]:
        if self.is_silent:
            raise DeadlineExceededError(f"no answer within {timeout} s")
        await self.metadata(model)
        return self.info

    async def tokenize(self, prompt: str | None = None, *, model: str, **options: Any) -> dict[str, Any]:
        """A token for each character of a prompt, its code; none for messages, whose options come back instead."""
        self.questions.append(options)
        limit = options.get("truncate_prompt_tokens")
        kept = (prompt or "")[-limit:] if limit else prompt or ""
        found = {"count": len(kept), "max_model_len": 2048, "tokens": list(map(ord, kept))}
        return found | ({} if limit is None else {"prompt": kept})

    async def tokenizer_info(self, model: str) -> dict[str, Any]:
        return {"tokenizer_class": "Toy", "bos_token": "<s>", "chat_template": "{{ messages }}"}

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str:
        if any(token_id > 0x10FFFF for token_id in token_ids):
            raise InvalidRequestError("input_ids: 2000000 is not in the vocabulary")
        return "".join(map(chr, token_ids))

    async def health(self) -> bool:
        return self.is_live

    async def control(
        self,
        name: str,
        model: str | None = None,
        timeout: float = 60.0,
        admin_key: str | None = None,
        parameters: Mapping[str, str | bool] | None = None,
    ) -> str:
        self.admin_keys.append(admin_key)
        if name in ("load_adapter", "unload_adapter"):
            self.changes.append((name, dict(parameters or {})))
            return self.change(name, dict(parameters or {}))
        assert name == "stats"
        if isinstance(self.stats, Exception):
            raise self.stats
        return json.dumps({**self.stats, "model": model})

    def change(self, name: str, parameters: dict[str, Any]) -> str:
        """As the backend: the errors have its words."""
        adapters, lora_name = self.info["adapters"], parameters["lora_name"]
        if name == "unload_adapter":
            if lora_name not in adapters:
                raise InvalidRequestError(f"The lora adapter '{lora_name}' cannot be found.")
            return json.dumps({"id": adapters.pop(lora_name)})
        if lora_name in adapters and not parameters["load_inplace"]:
            raise InvalidRequestError(f"The lora adapter '{lora_name}' has already been loaded.")
        if not parameters["lora_path"].startswith("/loras/"):
            raise InvalidRequestError(f"lora_path={parameters['lora_path']!r}: must be the absolute path of a folder")
        adapters[lora_name] = "1" * 32
        return json.dumps({"id": adapters[lora_name]})

    async def ready(self, model: str) -> bool:
        return self.is_ready

    async def responds(self, model: str) -> bool:
        return self.is_ready and not self.is_silent

    async def close(self) -> None:
        for stream in self.streams:
            stream.cancel()
