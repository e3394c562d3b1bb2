"""The choices of a completion, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight_client import Choice, ChoiceDelta, StreamChunk
from inflight_client.results import TokenLogprobs
from inflight_gateway.errors import APIError
from inflight_gateway.generation import failed_events
from inflight_gateway.legacy_logprobs import LegacyLogprobs, first_token_text, vllm_logprobs
from inflight_gateway.sse import DONE, EventTemplate, event
from inflight_gateway.stop_reason import shown_stop_reason
from inflight_gateway.usage import UsageCounter

__all__ = ["ChoiceBuilder", "CompletionEvents", "Plan"]


@dataclass(frozen=True)
class Plan:
    """The content of the choices of one prompt.

    Attributes:
        n: number of choices.
        echo: the prompt's text, to be repeated before the output; None: no echo.
        logprobs: candidates per token; None: no log probabilities.
        prompt_logprobs: return the prompt's log probabilities separately, as vLLM does.
        token_ids: return token ids.
        prompt_token_ids: the prompt's, if known.
        hides_output: return the prompt alone.
        continuous_usage: every event has the usage so far.
        ids_as_tokens: log probabilities name tokens by their ids.
        stop_token_ids: of the request.
    """

    n: int = 1
    echo: str | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    prompt_token_ids: list[int] | None = None
    hides_output: bool = False
    continuous_usage: bool = False
    ids_as_tokens: bool = False
    stop_token_ids: Sequence[int] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether chunks of a choice differ only in their text."""
        return self.logprobs is None and not self.token_ids and not self.continuous_usage


class ChoiceBuilder:
    """Creates the `choices` entries of one choice.

    Args:
        plan: of its prompt.
        index: among the choices of all prompts.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self._plan = plan
        self._index = index
        self._logprobs = None if plan.logprobs is None else LegacyLogprobs(plan.logprobs, plan.ids_as_tokens)
        self._started = False

    def whole(self, choice: Choice, prompt_rows: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """The only entry of a choice that does not stream; a missing finish reason means "stop"."""
        entry = self.entry(choice, prompt_rows)
        entry["finish_reason"] = entry["finish_reason"] or "stop"
        entry.setdefault("stop_reason", None)
        if self._plan.prompt_logprobs:
            entry["prompt_logprobs"] = vllm_logprobs(prompt_rows)
        return entry

    def entry(self, part: Choice | ChoiceDelta, prompt_rows: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """The entry for new output; the first one begins with the prompt if it is echoed."""
        plan, text, rows, ids = self._plan, part.text, list(part.logprobs or ()), part.token_ids
        reason = part.finish_reason
        if plan.hides_output:
            text, rows, ids, reason = "", [], [], "length"
        first, self._started = not self._started, True
        first_text = ""
        if first and plan.echo is not None:
            text = plan.echo + text
            if prompt_rows:
                first_text = first_token_text(prompt_rows, plan.echo)
                rows = [*prompt_rows, *rows]
        entry: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            found = None if plan.hides_output else part.stop_reason
            entry["stop_reason"] = shown_stop_reason(found, plan.stop_token_ids)
        if self._logprobs is not None:
            entry["logprobs"] = self._logprobs.add(rows, first_text)
        if plan.token_ids:
            entry["token_ids"] = ids
            entry["prompt_token_ids"] = plan.prompt_token_ids if first else None
        return entry

    def has_news(self, delta: ChoiceDelta) -> bool:
        """Whether a delta needs an event."""
        plan = self._plan
        if plan.hides_output:
            return not self._started
        if delta.text or delta.finish_reason or (plan.echo is not None and not self._started):
            return True
        return bool(delta.num_tokens) and not plan.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether the next entry differs from the previous one only in its text."""
        return self._plan.is_plain and self._started and not self._plan.hides_output


class CompletionEvents:
    """Encodes the stream of a request.

    Args:
        head: the common keys of all chunks.
        include_usage: add a last chunk with the usage.
        plans: one for each prompt.
    """

    def __init__(self, head: dict[str, Any], include_usage: bool, plans: list[Plan]) -> None:
        self._head = {**head, "usage": None} if include_usage else head
        self._include_usage = include_usage
        self._usage = UsageCounter(len(plans))
        self._plans = plans
        self._choices = [
            [ChoiceBuilder(plan, prompt * plan.n + i) for i in range(plan.n)] for prompt, plan in enumerate(plans)
        ]
        self._templates: dict[tuple[int, int], EventTemplate] = {}
        for index, plan in enumerate(plans):
            if plan.prompt_token_ids is not None:
                self._usage.expect(index, len(plan.prompt_token_ids))

    def begin(self) -> bytes:
        return b""

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        plan = self._plans[prompt]
        self._usage.add(prompt, chunk)
        if plan.hides_output:
            self._usage.completion_tokens = 0
        choices = self._choices[prompt]
        events = []
        for delta in chunk.choices:
            choice = choices[delta.index]
            if choice.is_plain and delta.finish_reason is None:
                if delta.text:
                    events.append(self._fill(prompt, delta))
            elif choice.has_news(delta):
                events.append(self._event(choice.entry(delta, chunk.prompt_logprobs), plan.continuous_usage))
        return b"".join(events)

    def _fill(self, prompt: int, delta: ChoiceDelta) -> bytes:
        """An event that differs from others of its choice only in its text."""
        key = prompt, delta.index
        template = self._templates.get(key)
        if template is None:
            entry = {"index": prompt * self._plans[prompt].n + delta.index, "logprobs": None, "finish_reason": None}
            template = EventTemplate(lambda text: {**self._head, "choices": [{**entry, "text": text}]})
            self._templates[key] = template
        return template.fill(delta.text)

    def _event(self, entry: dict[str, Any], with_usage: bool) -> bytes:
        usage = {"usage": self._usage.usage()} if with_usage else {}
        return event({**self._head, "choices": [entry], **usage})

    def end(self) -> bytes:
        if self._include_usage:
            return event({**self._head, "choices": [], "usage": self._usage.usage()}) + DONE
        return DONE

    def failed(self, error: APIError) -> bytes:
        return failed_events(error)
