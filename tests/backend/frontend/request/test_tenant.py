"""The tenant of a request: the claim, or the header of a proxy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import ConfigError, EngineConfig
from inflight.frontend.errors import RequestError
from inflight.frontend.request.tenant import tenant_of

names = st.sampled_from(["", "gold", "free", "Gold"])


@given(claim=names, header=st.none() | names)
def test_a_claim_never_changes_what_the_proxy_says(claim: str, header: str | None) -> None:
    parameters = {} if header is None else {"X-Tenant": header}
    assert tenant_of(None, parameters, claim) == claim
    try:
        assert tenant_of("x-tenant", parameters, claim) == (header or "")
    except RequestError as error:
        assert error.code == "INVALID_ARG"
        assert claim and claim != (header or "")


@pytest.mark.parametrize("parameters", [{"x-tenant": "a", "X-Tenant": "a"}, {"x-tenant": 1}, {"x-tenant": True}])
def test_a_header_that_comes_twice_or_is_no_text_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="must come once, with text"):
        tenant_of("x-tenant", parameters, "")


def test_the_refusal_tells_neither_the_headers_name_nor_the_tenants() -> None:
    with pytest.raises(RequestError) as refused:
        tenant_of("x-secret-8f21", {"x-secret-8f21": "bank"}, "gold")
    assert "8f21" not in refused.value.message
    assert "bank" not in refused.value.message


@pytest.mark.parametrize("name", ["tenant", "-x", "x-", "x_tenant", "", "x--y"])
def test_the_header_must_be_one_that_no_sampling_parameter_can_be(name: str) -> None:
    with pytest.raises(ConfigError, match="tenant_header="):
        EngineConfig.from_dict({"model": "a/b", "tenant_header": name})


def test_per_name_is_only_for_star() -> None:
    with pytest.raises(ConfigError, match=r"per_name is for \"\*\".*remove it from 'gold'"):
        EngineConfig.from_dict({"model": "a/b", "tenants": {"gold": {"per_name": True}}})
    EngineConfig.from_dict({"model": "a/b", "tenants": {"*": {"per_name": True}}})
