"""`control` requests with and without the admin key."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.frontend.errors import RequestError
from inflight.frontend.operator.admin_key import AdminKey
from inflight.frontend.request.contract import WireRequest

KEY = "0123456789abcdef"


def check(key: str | None, **parameters: Any) -> str | None:
    """The refusal of a request; None if it is accepted."""
    try:
        AdminKey(key).check(WireRequest({}, parameters))
    except RequestError as error:
        assert error.code == "INVALID_ARG"
        return error.message
    return None


@pytest.mark.parametrize("key", [None, KEY])
def test_requests_for_text_need_no_key(key: str | None) -> None:
    assert check(key, temperature=0) is None
    assert check(key, admin_key="anything") is None


@pytest.mark.parametrize("control", ["step_trace", "stats", "drain", "no such thing", 7])
def test_with_a_key_every_question_needs_it(control: Any) -> None:
    assert check(KEY, control=control, admin_key=KEY) is None
    assert "the admin key is missing" in str(check(KEY, control=control))
    for wrong in ("", KEY[:-1], KEY + "0", "ключ", "\ud800", 5, True):
        said = str(check(KEY, control=control, admin_key=wrong))
        assert "the admin key is wrong" in said
        assert KEY not in said


def test_without_a_key_changes_are_refused() -> None:
    assert check(None, control="step_trace") is None
    assert check(None, control="stats") is None
    for given in ({}, {"admin_key": ""}, {"admin_key": "None"}):
        assert "has no admin key, so it refuses this; set INFLIGHT_ADMIN_KEY" in str(
            check(None, control="drain", **given)
        )


def test_an_empty_variable_is_no_key() -> None:
    AdminKey.from_environment({"INFLIGHT_ADMIN_KEY": ""}).check(WireRequest({}, {"control": "stats"}))
    AdminKey.from_environment({}).check(WireRequest({}, {"control": "stats"}))
    with pytest.raises(RequestError):
        AdminKey.from_environment({"INFLIGHT_ADMIN_KEY": KEY}).check(WireRequest({}, {"control": "stats"}))
