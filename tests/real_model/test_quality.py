"""How far formats of weights and KV cache move the distributions of a model with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantization

pytestmark = [pytest.mark.nightly]

# Most nats per token, on average.
BOUNDS = {"bfloat16": 0.001, "int8 KV": 0.01, "int8 weights": 0.01, "int4 weights": 0.05}


@pytest.fixture(scope="module")
def measured(smollm2: Path) -> dict[str, dict[str, float]]:
    text = quantization.windows(smollm2, quantization.topics(), 2 * quantization.WINDOW)
    assert [len(ids) for ids in text] == [quantization.WINDOW + 1] * 2
    return quantization.measure(smollm2, text, [*BOUNDS])


@pytest.mark.parametrize("format", BOUNDS)
def test_a_format_changes_the_distributions_by_no_more_than_its_bound(
    measured: dict[str, dict[str, float]], format: str
) -> None:
    figures = measured[format]
    assert 0.0 < figures["kl_divergence"] <= BOUNDS[format], figures


def test_the_text_is_one_that_the_model_can_read(measured: dict[str, dict[str, float]]) -> None:
    """Else a divergence would say little."""
    assert measured["float32"]["perplexity"] < 30 and measured["float32"]["kl_divergence"] == 0.0
