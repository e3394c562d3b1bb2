"""`kv_transfer_params`: a proxy has one server compute the prompt, and another one generate the answer.

vLLM's proxies, vllm-router and llm-d's sidecar send a prompt to one server with `do_remote_decode` and a `max_tokens`
of 1, and give what it answers under this key to the other server, in place of their own.  In vLLM it names the
blocks to read.  Here an engine asks the tiers of its own configuration for KV, by content, so nothing needs to be told:
the answer has vLLM's keys and no address, and no address that a client sends is ever used.

https://docs.vllm.ai/en/latest/features/disagg_prefill.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["KVTransferParams", "for_another_server", "transfer_answer"]

_T = TypeVar("_T")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class KVTransferParams(msgspec.Struct):
    """The keys that have a meaning here; engines, blocks, hosts and ports do not.

    Attributes:
        do_remote_decode: another server generates the answer.
        do_remote_prefill: another server has computed the prompt.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


def for_another_server(body: dict[str, Any], value: Any, say: Callable[[str], None]) -> None:
    """A translation: of a prompt for another server, the keys that belong to the whole answer alone have no effect.

    Some proxies leave them as they are beside the one token and the missing stream.
    """
    body["kv_transfer_params"] = value
    params = _read(value, KVTransferParams)
    if params is None or not params.do_remote_decode:
        return
    if not _read(body.get("stream"), bool):
        body.pop("stream_options", None)
    limits = [limit for name in _LIMITS if (limit := _read(body.get(name), int)) is not None]
    least = _read(body.get("min_tokens"), int)
    if limits and least is not None:
        body["min_tokens"] = min(least, *limits)


def _read(value: Any, kind: type[_T]) -> _T | None:
    """Numbers and booleans can be strings, as in all bodies.  None: it is something else, and the body is refused."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


def transfer_answer(params: KVTransferParams | None) -> dict[str, Any]:
    """The keys of an answer for a request with these `params`; none, unless another server generates the rest."""
    if params is None or not params.do_remote_decode:
        return {}
    nowhere = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, **nowhere}}
