"""Log probabilities as tests compare them."""

from __future__ import annotations

from inflight.engine.logprobs import TokenLogprobs
from inflight.sampling import SamplerOutput

__all__ = ["logprobs_of"]


def logprobs_of(output: SamplerOutput) -> dict[int, TokenLogprobs]:
    """Row -> its triples, for the rows with log probabilities."""
    return dict(zip(output.logprobs_rows, output.logprobs))
