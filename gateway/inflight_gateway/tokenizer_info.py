"""`/tokenizer_info`, in vLLM's form.

It shows the whole chat template, which can contain an operator's own instructions: it answers only if the operator
says so.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.errors import APIError
from inflight_gateway.gateway import gateway_of
from inflight_gateway.sse import encode_json

__all__ = ["tokenizer_info"]


async def tokenizer_info(http: Request) -> Response:
    """The settings of the tokenizer of the query's `model`, which can be left out if there is only one."""
    gateway = gateway_of(http)
    if not gateway.options.enable_tokenizer_info_endpoint:
        message = "/tokenizer_info is off; the gateway's option --enable-tokenizer-info-endpoint turns it on"
        raise APIError(404, message, code="unsupported_endpoint")
    model = await gateway.upstream.resolve(http.query_params.get("model"))
    found = await gateway.upstream.tokenizer_info(model)
    return Response(encode_json(found), media_type="application/json")
