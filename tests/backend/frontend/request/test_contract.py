"""The tables of the wire contract and the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.frontend.operator.metric_specs import ADAPTER_METRICS, METRICS
from inflight.frontend.request.contract import INPUTS, OUTPUTS, TensorSpec
from inflight.frontend.request.sampling_keys import SAMPLING_KEYS

ROOT = Path(__file__).parents[4]


def documented(heading: str) -> list[list[str]]:
    """Rows of the table under a heading of the wire contract, without backticks."""
    text = (ROOT / "docs" / "wire-contract.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(("heading", "specs"), [("Inputs", INPUTS), ("Outputs", OUTPUTS)])
def test_the_page_lists_the_declared_tensors(heading: str, specs: tuple[TensorSpec, ...]) -> None:
    found = [(name, data_type, dims) for name, data_type, dims, *_ in documented(heading)]
    assert found == [(s.name, s.data_type.removeprefix("TYPE_"), str(list(s.dims))) for s in specs]


def test_the_page_names_every_metric() -> None:
    assert [row[0] for row in documented("Metrics")] == [spec.name for spec in (*METRICS, *ADAPTER_METRICS)]


def test_no_tensor_is_declared_twice() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)


def test_the_page_names_every_sampling_key() -> None:
    text = (ROOT / "docs" / "wire-contract.md").read_text(encoding="utf-8")
    known = {name for name, key in SAMPLING_KEYS.items() if key.has_effect}
    assert known <= set(re.findall(r"`(\w+)`", text))
