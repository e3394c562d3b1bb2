"""Token counts of an answer, and the fingerprint of its model."""

from __future__ import annotations

from typing import Any

from inflight_client import GenerationResult, StreamChunk
from inflight_gateway.options import GatewayOptions
from inflight_gateway.reasoning_tokens import ReasoningTokens
from inflight_gateway.upstream import ServedModel

__all__ = ["UsageCounter", "fingerprint_of", "usage_of"]


def _usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, reasoning: ReasoningTokens | None = None
) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning.count}
    return usage


class UsageCounter:
    """Counts the chunks of a request's streams.

    Args:
        prompts: number of prompts.
        reasoning: counts the reasoning tokens, if they can be identified.
    """

    def __init__(self, prompts: int = 1, reasoning: ReasoningTokens | None = None) -> None:
        self._reasoning = reasoning
        self._prompt_tokens = [0] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self.completion_tokens = 0

    def add(self, prompt: int, chunk: StreamChunk) -> None:
        """A chunk of the stream of prompt number `prompt` arrived."""
        if chunk.num_input_tokens is not None:
            self._prompt_tokens[prompt] = chunk.num_input_tokens
        cached = chunk.num_cached_tokens
        if cached is not None:
            self._cached_tokens[prompt] = cached
        for delta in chunk.choices:
            self.completion_tokens += delta.num_tokens
            if self._reasoning is not None:
                self._reasoning.add(delta.index, delta.token_ids)

    def expect(self, prompt: int, tokens: int) -> None:
        """The length of a prompt that was sent as token ids; the server does not repeat it."""
        self._prompt_tokens[prompt] = tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` of all prompts together, so far."""
        cached = [count for count in self._cached_tokens if count is not None]
        total = sum(cached) if cached else None
        return _usage(sum(self._prompt_tokens), self.completion_tokens, total, self._reasoning)


def usage_of(
    results: list[GenerationResult], hidden: int = 0, reasoning: ReasoningTokens | None = None
) -> dict[str, Any]:
    """OpenAI's `usage` of complete answers together, without `hidden` output tokens."""
    if reasoning is not None:
        for result in results:
            for choice in result.choices:
                reasoning.add(choice.index, choice.token_ids)
    cached = [result.usage.cached_tokens for result in results]
    known = [count for count in cached if count is not None]
    return _usage(
        sum(result.usage.input_tokens or 0 for result in results),
        sum(result.usage.output_tokens for result in results) - hidden,
        sum(known) if known else None,
        reasoning,
    )


def fingerprint_of(options: GatewayOptions, model: ServedModel) -> str | None:
    """`system_fingerprint`: checkpoint and version of the backend; None if the model does not say."""
    if options.system_fingerprint:
        return options.system_fingerprint
    version, checkpoint = model.info.get("version"), model.info.get("checkpoint_id")
    return f"inflight-{version}-{checkpoint}" if checkpoint else None
