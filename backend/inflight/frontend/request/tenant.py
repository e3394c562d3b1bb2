"""The tenant of a request: named by the operator's proxy in a header, or claimed by the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.frontend.errors import RequestError, shown

__all__ = ["tenant_of"]


def tenant_of(header: str | None, parameters: Mapping[str, Any], claim: str) -> str:
    """The tenant; "" for none.

    Triton forwards headers as request parameters (`--grpc-header-forward-pattern`), after the client's own; so of two
    parameters with one name, the proxy's remains.

    Args:
        header: `tenant_header` of model.json; None: use the claim.
        parameters: all parameters of the request.
        claim: the input `tenant`.

    Raises:
        RequestError: INVALID_ARG; the claim differs from the header, or the header came twice.
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
