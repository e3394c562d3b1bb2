"""Which tenant a request belongs to: what the operator's proxy says in a header, or what the client claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.frontend.errors import RequestError, shown

__all__ = ["tenant_of"]


def tenant_of(header: str | None, parameters: Mapping[str, Any], claim: str) -> str:
    """The tenant; "" for none.

    Triton forwards headers as request parameters (`--grpc-header-forward-pattern`), where they stand behind those of
    the client, so that of two with one name the proxy's is left.

    Args:
        header: `tenant_header` of model.json; None takes the claim.
        parameters: all of the request.
        claim: the input `tenant`.

    Raises:
        RequestError: INVALID_ARG; the claim is not what the header says, or the header came twice.
    """
    if header is None:
        return claim
    values = [value for name, value in parameters.items() if name.lower() == header.lower()]
    if len(values) > 1 or not all(isinstance(value, str) for value in values):
        raise RequestError("INVALID_ARG", "the header that names the tenant must come once, with text")
    tenant = values[0] if values else ""
    if claim and claim != tenant:
        raise RequestError(
            "INVALID_ARG",
            f"tenant={shown(claim)}: a proxy in front of this model names the tenant, and it names another one or "
            "none; leave tenant out",
        )
    return tenant
