"""`SamplingOps` on a GPU: each operation is one or two kernel launches, and the host waits for none of them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from inflight.device.upload import upload
from inflight.kernels.gpu import gpu_bad_words, gpu_bitmask, gpu_penalties, gpu_sampler
from inflight.sampling.ops import CountedRows, MatchedWords, PenalisedTokens

__all__ = ["GpuSampling"]


class GpuSampling:
    """Masks are applied to the logits first: `choose` takes none."""

    draws = True
    draws_masked = False
    compiles = True

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: np.ndarray | None = None) -> Tensor:
        assert bitmask is None, "draws_masked is False"
        return gpu_sampler.choose(logits, columns, marks=marks)

    def mask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        gpu_bitmask.apply(logits, upload(rows, logits.device), upload(bitmask, logits.device))

    def penalise(self, logits: Tensor, penalised: PenalisedTokens) -> None:
        gpu_penalties.penalise(logits, penalised)

    def count_and_penalise(self, logits: Tensor, counted: CountedRows) -> None:
        gpu_penalties.count_and_penalise(logits, counted)

    def ban_words(self, logits: Tensor, matched: MatchedWords) -> None:
        gpu_bad_words.ban(logits, matched)
