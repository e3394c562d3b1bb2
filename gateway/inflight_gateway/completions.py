"""`/v1/completions`."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight_client import GenerationResult
from inflight_gateway.arguments import base_arguments, request_id_of
from inflight_gateway.bodies import COMMON_IGNORED, SamplingBody, read_body
from inflight_gateway.completion_events import ChoiceBuilder, CompletionEvents, Plan
from inflight_gateway.errors import invalid
from inflight_gateway.fill_in_middle import fill_in_middle
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.generation import complete, stream_events
from inflight_gateway.kv_transfer import transfer_answer
from inflight_gateway.length_limit import LengthLimit, check_ids
from inflight_gateway.response_format import body_constraint
from inflight_gateway.sse import encode_json
from inflight_gateway.translations import COMPLETIONS, Translation
from inflight_gateway.upstream import ServedModel
from inflight_gateway.usage import fingerprint_of, usage_of

__all__ = ["CompletionBody", "answer_completion", "checked_prompts", "completion_requests", "completions"]

_EXPECTED = "prompt: a text, a list of token ids, or a list of either is expected"


class CompletionBody(SamplingBody, kw_only=True):
    """A completion request.  `prompt`: a text, token ids, or a list of either."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (None, False),
        "prompt_embeds": (None,),
        "length_penalty": (None, 1, 1.0),
        "logprob_token_ids": (None, []),
        "truncation_side": (None, "left"),
        "add_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "logits_processors": (None,),
        # vllm-router sends these with every completion.
        "no_stop_trim": (None, False),
        "return_hidden_states": (None, False),
    }
    IGNORED: ClassVar[frozenset[str]] = COMMON_IGNORED
    TRANSLATED: ClassVar[dict[str, Translation]] = COMPLETIONS

    prompt: Any
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    response_format: Any = None
    return_tokens_as_token_ids: bool | None = None


async def completions(http: Request) -> Response:
    """Continue each prompt."""
    return await answer_completion(http, await read_body(http, CompletionBody, gateway_of(http)))


async def answer_completion(http: Request, body: CompletionBody) -> Response:
    """The answer to a completion request whose body was read."""
    gateway = gateway_of(http)
    prompts = checked_prompts(gateway, body)
    model = await gateway.upstream.resolve(body.model)
    prompts = completion_requests(gateway, http, model, body, prompts)
    plans = [await _plan(gateway, model, body, prompt) for prompt in prompts]
    request_id = request_id_of(http, body)
    requests = [{**prompt, "request_id": f"{request_id}-{i}"} for i, prompt in enumerate(prompts)]
    head = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.id,
        "system_fingerprint": fingerprint_of(gateway.options, model),
    }
    limit = LengthLimit.of("max_tokens", body.max_tokens, model)
    if body.stream:
        return await stream_events(gateway, http, requests, limit, CompletionEvents(head, body.include_usage, plans))
    results = await complete(gateway, http, [{**request, "one_response": True} for request in requests], limit)
    found = _whole(head, plans, results) | transfer_answer(body.kv_transfer_params)
    return Response(encode_json(found), media_type="application/json")


def checked_prompts(gateway: Gateway, body: CompletionBody) -> list[dict[str, Any]]:
    """The prompts of a request, as arguments of `AsyncClient.stream`.

    Raises:
        APIError: the request is not valid.
    """
    prompts = _prompts(body.prompt, gateway.options.max_prompts)
    _check(body)
    return prompts


def completion_requests(
    gateway: Gateway, http: Request, model: ServedModel, body: CompletionBody, prompts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The arguments of `AsyncClient.stream` for each of `checked_prompts`, without a request id.

    Raises:
        APIError: the request is not valid, or the model cannot fill the gap before a suffix.
    """
    if body.truncate_prompt_tokens is None:
        _check_lengths(model, prompts)
    arguments = _arguments(gateway, http, model, body)
    _check_repeated([arguments, body.suffix], len(prompts), gateway.options.max_body_bytes)
    if body.suffix:
        prompts, arguments = _filled(gateway, model, body, prompts, arguments)
    return [{**arguments, **prompt} for prompt in prompts]


def _check_repeated(options: list[Any], count: int, limit: int) -> None:
    """Raise an error if the options, which Triton gets with each of `count` prompts, would have more bytes than a body
    can have."""
    if count > 1 and (size := count * len(msgspec.json.encode(options))) > limit:
        raise invalid(
            f"prompt: {count} prompts came, and the other keys would take {size} bytes for all of them; at most "
            f"{limit} are allowed (max_body_bytes), so send fewer prompts at once",
            "prompt",
        )


def _check_lengths(model: ServedModel, prompts: list[dict[str, Any]]) -> None:
    """Raise an error for token ids far beyond the context, before they take the time to be sent."""
    if context := model.info.get("max_model_len"):
        for i, prompt in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            why = f"max_model_len={context} minus one output token"
            check_ids(name, len(prompt.get("input_ids", ())), context - 1, why)


def _check(body: CompletionBody) -> None:
    """Raise an error for values that only this endpoint refuses."""
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 came; at least 1 is expected, or 0 together with echo", "max_tokens")
    if body.logprobs is not None and body.logprobs < 0:
        raise invalid(f"logprobs: {body.logprobs} came; at least 0 is expected", "logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not part of a stream; leave out one of the two", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options are for requests with stream: true", "stream_options")


def _arguments(gateway: Gateway, http: Request, model: ServedModel, body: CompletionBody) -> dict[str, Any]:
    arguments = base_arguments(gateway, http, model, body)
    if body.logprobs is not None:
        arguments["logprobs"] = body.logprobs
        if body.echo:
            arguments["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == -1:
        arguments["max_tokens"] = LengthLimit.longest(model)
    constraint = body_constraint(body.response_format, body.structured_outputs)
    if constraint is not None:
        arguments["structured_outputs"] = constraint
    if body.max_tokens == 0:  # the server generates at least one; it is not shown
        arguments["max_tokens"] = 1
    return arguments


def _filled(
    gateway: Gateway, model: ServedModel, body: CompletionBody, prompts: list[dict[str, Any]], arguments: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Prompts and arguments that fill the gap in front of `suffix`."""
    filling = fill_in_middle(gateway.options.fim_template, model.info, model.name, body.suffix or "")
    if any("prompt" not in prompt for prompt in prompts):
        raise invalid("suffix: prompts that are token ids have none; send texts, or leave it out", "suffix")
    for key, given in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None)):
        if given:
            raise invalid(f"suffix: {key} beside it is not supported; leave out one of the two", key)
    if filling.stop_token_ids and not body.ignore_eos:
        stops = {*(body.stop_token_ids or ()), *filling.stop_token_ids}
        arguments = {**arguments, "stop_token_ids": sorted(stops)}
    return [{"prompt": filling.prompt(prompt["prompt"])} for prompt in prompts], arguments


def _prompts(value: Any, limit: int) -> list[dict[str, Any]]:
    """The arguments of `AsyncClient.stream` for each prompt."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid(_EXPECTED, "prompt")
    if len(value) > limit:
        raise invalid(f"prompt: {len(value)} prompts came; at most {limit} are allowed (max_prompts)", "prompt")
    return [_prompt(one) for one in value]


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and {int}.issuperset(map(type, value)):
        return {"input_ids": value}
    raise invalid(_EXPECTED, "prompt")


async def _plan(gateway: Gateway, model: ServedModel, body: CompletionBody, prompt: dict[str, Any]) -> Plan:
    """The content of the choices of a prompt."""
    limit = body.truncate_prompt_tokens
    ids: list[int] | None = prompt.get("input_ids")
    text: str | None = prompt.get("prompt") if body.echo else None
    if ids is not None:
        ids = _last(ids, limit, model)
        if body.echo:
            text = await gateway.upstream.detokenize(model, ids)
    elif body.return_token_ids or (body.echo and limit is not None):
        question = {} if limit is None else {"truncate_prompt_tokens": limit}
        found = await gateway.upstream.tokenize(model, prompt=prompt["prompt"], **question)
        ids = found["tokens"]
        text = found["prompt"] if body.echo and limit is not None else text
    return Plan(
        n=body.n or 1,
        echo=text,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        prompt_token_ids=ids,
        hides_output=body.max_tokens == 0,
        continuous_usage=body.continuous_usage,
        ids_as_tokens=bool(body.return_tokens_as_token_ids),
        stop_token_ids=body.stop_token_ids,
    )


def _last(ids: list[int], limit: int | None, model: ServedModel) -> list[int]:
    """The ids that are left by `truncate_prompt_tokens`; the server refuses a wrong value."""
    if limit == -1:
        limit = model.info.get("max_model_len", 0) - 1
    return ids if limit is None or limit < 1 else ids[-limit:]


def _whole(head: dict[str, Any], plans: list[Plan], results: list[GenerationResult]) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    choices = []
    for index, (plan, result) in enumerate(zip(plans, results)):
        for choice in result.choices:
            builder = ChoiceBuilder(plan, index * plan.n + choice.index)
            choices.append(builder.whole(choice, result.prompt_logprobs))
    hidden = sum(result.usage.output_tokens for plan, result in zip(plans, results) if plan.hides_output)
    return {**head, "choices": choices, "usage": usage_of(results, hidden)}
