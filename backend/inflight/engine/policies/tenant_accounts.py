"""Maps tenants to accounts, which have shares and limits.  Pure Python, no torch."""

from __future__ import annotations

from inflight.config import EngineConfig, TenantOptions

__all__ = ["TenantAccounts"]

_OTHERS = "*"


class TenantAccounts:
    """An account for each tenant that `tenants` names, and one that all others share.

    So a client gains nothing by making up names: they all share one account.  Names that come from the operator's
    proxy (`tenant_header`) are not made up, so each has an account of its own; `per_name` of "*" overrides this.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._named = config.tenants
        self._others = config.tenants.get(_OTHERS, TenantOptions())
        per_name = self._others.per_name
        self._per_name = config.tenant_header is not None if per_name is None else per_name

    def of(self, tenant: str) -> str:
        """Name of the account: the tenant's own, or "*"."""
        return tenant if self._per_name or tenant in self._named else _OTHERS

    def options(self, account: str) -> TenantOptions:
        """Share and limits of an account."""
        return self._named.get(account, self._others)
