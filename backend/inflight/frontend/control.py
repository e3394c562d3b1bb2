"""Requests that ask for something other than text: the request parameter `control` names it."""

from __future__ import annotations

from inflight.frontend.contract import WireRequest
from inflight.frontend.errors import RequestError, shown

__all__ = ["STEP_TRACE", "asks_for_trace"]

STEP_TRACE = "step_trace"


def asks_for_trace(wire: WireRequest) -> bool:
    """Whether the request wants the step trace instead of text.

    Raises:
        RequestError: INVALID_ARG; a `control` that there is not.
    """
    control = wire.parameters.get("control")
    if control not in (None, STEP_TRACE):
        raise RequestError("INVALID_ARG", f'control={shown(control)}: allowed is "{STEP_TRACE}"')
    return control is not None
