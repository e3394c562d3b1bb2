"""`LLM(model).generate(prompts, params)`: the engine in this process, without Triton, for callers that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Union

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.step_trace import StepTrace
from inflight.frontend.request.pooled_prompts import PooledPlan, PooledPrompts
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.in_process.local_engine import LocalEngine, OpenRequest
from inflight.in_process.lora import Adapters, LoRARequest
from inflight.in_process.outputs import RequestOutput
from inflight.in_process.params import SamplingParams
from inflight.in_process.pooled_calls import PooledCalls, Progress
from inflight.in_process.prompts import Conversation, Prompt, is_conversation, is_prompt, listed, read_chat, read_prompt

__all__ = ["LLM"]

Params = Union[SamplingParams, Sequence[SamplingParams], None]


class LLM(PooledCalls):
    """A checkpoint, an engine and a tokenizer in this process.

    All methods can be called from several threads; their requests share the engine's batches.  Ctrl-C ends the call
    that waits, and the engine stays usable.

    Args:
        model: checkpoint directory, GGUF file or hub id.
        options: any other key of `EngineConfig`, e.g. `dtype="float32"`, `max_num_seqs=8`.

    Raises:
        ConfigError, LoadError: the options or the checkpoint cannot be used.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LocalEngine("LLM()", model, options)

    @property
    def config(self) -> EngineConfig:
        """The engine's options, with the device that was found."""
        return self.engine.config

    @property
    def core(self) -> EngineCore:
        """The engine; another one after an interrupted step."""
        return self.engine.core

    @property
    def trace(self) -> StepTrace | None:
        """The step trace, if `step_trace` asks for one."""
        return self.engine.trace

    @property
    def pooled_prompts(self) -> PooledPrompts:  # type: ignore[override]
        """Checks and tokenises what is to be embedded, scored or classified."""
        return self.engine.pooled_prompts

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as transformers loads it."""
        from transformers import AutoTokenizer

        config = self.config
        return AutoTokenizer.from_pretrained(
            config.tokenizer_source,
            revision=config.tokenizer_source_revision,
            trust_remote_code=config.trust_remote_code,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a request without any: the checkpoint's `generation_config`."""
        return self.engine.defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch; results come in the order of the prompts.

        Args:
            prompts: one or several, see `Prompt`.
            sampling_params: one for all prompts or one per prompt; None means `get_default_sampling_params()`.
            use_tqdm: see `Progress`.
            lora_request: the adapter of all prompts, or one per prompt; None: the checkpoint alone.
            priority: one per prompt; the option `scheduling_policy="priority"` serves smaller numbers sooner.

        Raises:
            ValueError: a prompt or parameter cannot be served, or exceeds `max_n` or `max_logprobs`; nothing has run.
            RequestError: a request failed in the engine; the others are aborted.
            RuntimeError: the LLM is closed, or this process was forked from the one that made it.
        """
        prompts = listed(prompts)
        asked = [prompts] if is_prompt(prompts) else list(prompts)
        read = [read_prompt(prompt, self.tokenizer) for prompt in asked]  # before any of them runs
        return self._wait_for(*self._submit(read, sampling_params, priority, lora_request), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the checkpoint's chat template.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
            sampling_params, use_tqdm, lora_request: as `generate`.
            tools: as in OpenAI's API; they reach templates that know tools.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            continue_final_message: go on with the last message instead.
            chat_template: Jinja source that replaces the template; the option of this name does so for all calls.
            chat_template_kwargs: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it rejects the messages.  It is a ValueError.
            ValueError, RequestError, RuntimeError: as `generate`.
        """
        conversations = [messages] if is_conversation(messages) else list(messages)
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        template = self.engine.chat_template(chat_template is not None)
        read = [read_chat(conversation, options, template, self.tokenizer) for conversation in conversations]
        return self._wait_for(*self._submit(read, sampling_params, None, lora_request), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the request's state after each step that advanced it.  Closing the iterator aborts the request.

        Raises:
            ValueError, RequestError, RuntimeError: as `generate`.
        """
        read = read_prompt(prompt, self.tokenizer)
        requests, advanced = self._submit([read], sampling_params, None, lora_request)
        try:
            for _ in self._advance(requests, advanced):
                yield requests[0].result
        finally:
            self.engine.abort(requests)

    def close(self) -> None:
        """Free the checkpoint's memory; open requests fail.  Safe to repeat; a `with` block does it at its end."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.engine.description()})"

    def _submit(
        self,
        read: Sequence[tuple[str | None, list[int]]],
        params: Params,
        priority: Sequence[int] | None,
        adapters: Adapters,
    ) -> tuple[list[OpenRequest], deque[OpenRequest]]:
        """The open requests, and the queue that receives each of them whenever it has advanced."""
        if not isinstance(params, Sequence):
            params = [self.engine.defaults if params is None else params] * len(read)
        if len(params) != len(read):
            raise ValueError(f"{len(read)} prompts, but {len(params)} params: give one for all or one per prompt")
        if priority is not None and len(priority) != len(read):
            raise ValueError(f"{len(read)} prompts, but {len(priority)} priorities: give one per prompt")
        advanced: deque[OpenRequest] = deque()
        return self.engine.submit(read, params, advanced.append, priority, adapters), advanced

    def _submit_pooled(
        self, plans: Sequence[PooledPlan], advanced: Callable[[Any], None], adapter: LoRARequest | None
    ) -> list[Any]:
        return self.engine.submit_pooled(plans, advanced, adapter)

    def _wait_for(self, requests: list[Any], advanced: deque[Any], use_tqdm: Progress) -> list[Any]:
        bar = _bar(use_tqdm, len(requests))
        try:
            for num_finished in self._advance(requests, advanced):
                if bar is not None and num_finished:
                    bar.update(num_finished)
        finally:
            self.engine.abort(requests)
            if bar is not None:
                bar.close()
        return [request.result for request in requests]

    def _advance(self, requests: list[Any], advanced: deque[Any]) -> Iterator[int]:
        """Step until all of `requests` are finished; yields, when some advanced, how many of them finished.

        Steps also serve other open requests, and other threads' steps serve these.

        Raises:
            RequestError: one of `requests` failed in the engine.
        """
        left = {request.request_id for request in requests}
        while left:
            if not advanced:
                self.engine.step()
                continue
            before = len(left)
            for _ in range(len(advanced)):  # a request can be there several times
                request = advanced.popleft()
                request.check()
                if request.result.finished:
                    left.discard(request.request_id)
            yield before - len(left)


def _bar(use_tqdm: Progress, total: int) -> Any:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Prompts")
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Prompts", unit="prompt", disable=None, leave=False)  # None: no terminal, no bar
