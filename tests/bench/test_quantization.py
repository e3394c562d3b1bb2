"""The demo model in four bits: `inflight quantize` loses less than rounding does, though the latter is searched."""

from __future__ import annotations

import common
import pytest
import quantization


@pytest.mark.nightly
def test_gptq_on_own_samples_loses_less_than_rounding() -> None:
    text = quantization.windows(common.DEMO, quantization.held_out(), 2 * quantization.WINDOW)
    found = quantization.measure(common.DEMO, text, ["int4 weights, GPU", quantization.GPTQ])
    rounding, tuned = (found[name]["kl_divergence"] for name in ("int4 weights, GPU", quantization.GPTQ))
    assert 0 < tuned < 0.03 and tuned < 0.85 * rounding, found
