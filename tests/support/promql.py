"""Just enough PromQL to find the time series in an expression."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "inflight.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "inflight-alerts.yml").read_text())

_FUNCTIONS = {"sum", "rate", "min_over_time", "deriv", "histogram_quantile", "increase", "absent"}
_WORDS = _FUNCTIONS | {"by", "and", "or", "unless"}


def expressions() -> list[tuple[str, str]]:
    """(title, expression) of all panels and alerts."""
    panels = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return panels + [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """Names of series: the identifiers that remain without strings, selectors, ranges, label lists and functions."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - _WORDS
