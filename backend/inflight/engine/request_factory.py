"""Checks that a request can be served, and makes its sequences.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from inflight.engine.adapter import Adapters
from inflight.engine.deltas import RequestFailed
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.engine.request import Request, Status
from inflight.engine.request_choice import RequestChoice, attach_choices
from inflight.engine.stop_rules import max_total_tokens, stop_ids
from inflight.engine.tiers.tiers import Tiers
from inflight.grammars.base import Grammars

__all__ = ["ModelInfo", "make_sequences", "refusal", "sequence_seed"]

_MASK64 = 2**64 - 1


class ModelInfo(Protocol):
    """The facts of the loaded checkpoint that the core needs."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    num_host_blocks: int
    swap_seconds_per_block: float
    choices: list[RequestChoice]
    grammars: Grammars | None
    whole_prompts: bool
    tiers: Tiers | None
    adapters: Adapters | None


def sequence_seed(seed: int, index: int) -> int:
    """64-bit seed of the `index`-th sequence of a request; the first one keeps the request's seed.

    The mixing is SplitMix64's finaliser (Steele et al., OOPSLA 2014), so that neighbouring seeds and indices
    give unrelated noise.
    """
    if index == 0:
        return seed & _MASK64
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def refusal(message: AddRequest, info: ModelInfo, pool: KVPool) -> RequestFailed | None:
    """Why the request can never be served (INVALID_ARG), or None."""
    try:
        _check(message, info, pool)
    except ValueError as error:
        return RequestFailed(message.request_id, "INVALID_ARG", str(error))
    return None


def make_sequences(
    message: AddRequest, info: ModelInfo, caches_prefixes: bool, clock: Callable[[], float]
) -> list[Request]:
    """The n sequences of a request that `refusal` accepts, by index; sequences that had already ended are FINISHED.

    With n > 1 they share the prompt's blocks through the prefix cache; where that is off, under a salt of the
    request's own.  The first one to run computes the prompt, so it alone has the prompt's log probabilities.
    """
    params = message.params
    of_others = msgspec.structs.replace(params, prompt_logprobs=None)
    arrival = clock() if message.arrival is None else message.arrival
    outputs = message.output_token_ids or [[]] * params.n
    attached = attach_choices(info.choices, len(message.prompt_token_ids), params.max_tokens, message.attached)
    salt = message.cache_salt if caches_prefixes else f"request {message.request_id}"
    salts = (salt, *filter(None, (choice.salt(attached) for choice in info.choices)))
    pooling, longest = _pooling(message), _longest(message, info)
    shares = not info.whole_prompts and (pooling is None or pooling.kind == "last")
    first = next(index for index, output in enumerate(outputs) if output is not None)
    return [
        Request(
            message.request_id,
            message.prompt_token_ids,
            params if index == first else of_others,
            output or (),
            index=index,
            arrival_time=arrival,
            priority=message.priority,
            tenant=message.tenant,
            deadline=message.deadline,
            cache_salts=salts,
            attached=attached,
            caches_blocks=(caches_prefixes or params.n > 1) and shares,
            seed=sequence_seed(params.seed or 0, index),
            stop_ids=stop_ids(message.params, info.eos_token_ids),
            max_total_tokens=max_total_tokens(message.params, len(message.prompt_token_ids), longest),
            status=Status.FINISHED if output is None else Status.WAITING,
        )
        for index, output in enumerate(outputs)
    ]


def _check(message: AddRequest, info: ModelInfo, pool: KVPool) -> None:
    num_tokens = len(message.prompt_token_ids)
    if not num_tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if num_tokens >= _longest(message, info):
        raise ValueError(
            f"the prompt has {num_tokens} tokens: at most {_longest(message, info) - 1} fit "
            f"max_model_len={info.max_model_len}{' with one output token' if _pooling(message) is None else ''}"
        )
    _check_ids("input_ids", message.prompt_token_ids, info)
    message.params.validate(vocab_size=info.vocab_size)
    if message.params.grammar is not None and info.grammars is None:
        raise ValueError("structured output is not supported by this engine")
    if message.attached is not None and message.attached.adapter is not None and info.adapters is None:
        name = message.attached.adapter.name
        raise ValueError(f'adapter {name!r}: LoRA is off; set "enable_lora": true in model.json and reload the model')
    if _pooling(message) is not None:
        _check_pooled(message)
    total = max_total_tokens(message.params, num_tokens, _longest(message, info))
    if message.output_token_ids:
        _check_outputs(message, info, total - num_tokens)
    need = pool.blocks_for(min(total, info.max_model_len))
    if need > pool.num_blocks:
        raise ValueError(
            f"the request never fits: {num_tokens} prompt and up to {total - num_tokens} output tokens take "
            f"{need} KV blocks of {pool.block_size} tokens, and the pool has {pool.num_blocks}; lower max_tokens "
            "or the prompt, or raise kv_cache_memory"
        )


def _pooling(message: AddRequest) -> Pooling | None:
    return None if message.attached is None else message.attached.pooling


def _longest(message: AddRequest, info: ModelInfo) -> int:
    """Tokens that a request can have; the last one of a pooled request is void, and comes on top."""
    return info.max_model_len + (_pooling(message) is not None)


def _check_pooled(message: AddRequest) -> None:
    params = message.params
    asked = (params.n, params.max_tokens, params.logprobs, params.prompt_logprobs, params.grammar)
    if asked != (1, 1, None, None, None) or any(message.output_token_ids):
        raise ValueError("a pooled request has one void token: leave out n, logprobs, grammars and earlier output")


def _check_ids(name: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{name}: token id {bad} is not in the vocabulary [0, {info.vocab_size - 1}]")


def _check_outputs(message: AddRequest, info: ModelInfo, limit: int) -> None:
    """Check the outputs to continue from: one for each sequence, none of them at its end."""
    outputs, n = message.output_token_ids, message.params.n
    if len(outputs) != n:
        raise ValueError(f"output_token_ids has {len(outputs)} entries: give one for each of the n={n} sequences")
    if all(output is None for output in outputs):
        raise ValueError("output_token_ids: every sequence has ended; leave the request out")
    for index, output in enumerate(outputs):
        if not output:
            continue
        _check_ids("output_token_ids", output, info)
        if len(output) >= limit:
            raise ValueError(
                f"output_token_ids: sequence {index} has {len(output)} tokens already, and max_tokens and "
                f"max_model_len allow {limit}; give null for a sequence that has ended"
            )
        if output[-1] in stop_ids(message.params, info.eos_token_ids):
            raise ValueError(
                f"output_token_ids: sequence {index} ended with stop token {output[-1]}; give null for a sequence "
                "that has ended"
            )
