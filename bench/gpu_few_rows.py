"""The split-K product against torch's on a GPU, in decode steps of few requests.  Used by bench/gpu_ops.py.

A product of at most 16 rows is limited by the bytes of its weights, so it is compared with the rate at which the card
reads.  Times are medians of graph replays over enough copies of the weights that none remains in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rates import FLUSH_BYTES, read_rate, seconds

from inflight.kernels.gpu.gpu_split_k import Workspace, num_sms_of, split_k_linear, split_of


def few_row_rows(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows {name, shape, microseconds, achieved, limit, ratio, unit, over_torch}; `over_torch` is the speedup."""
    if device.type == "cpu":
        sizes, batches = [(64, 1024)], [2]
    else:  # output and down projections of Llama 3 8B and of Qwen3 0.6B
        sizes, batches = [(4096, 4096), (4096, 14336), (1024, 2048), (1024, 3072)], [1, 16] if quick else [1, 4, 8, 16]
    rate = read_rate(device)
    for outputs, inputs in sizes:
        split = split_of(outputs, inputs, num_sms_of(device))
        assert split is not None
        workspace, moved = Workspace([(split, outputs)], device), 2 * outputs * inputs
        copies = 1 if device.type == "cpu" else min(512, max(2, FLUSH_BYTES // moved))
        weights = [torch.randn(outputs, inputs, device=device).bfloat16() for _ in range(copies)]
        for rows in batches:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            ours = seconds([partial(split_k_linear, x, weight, None, split, workspace) for weight in weights], device)
            by_torch = seconds([partial(F.linear, x, weight) for weight in weights], device)
            yield dict(name="split-K product", shape=f"{rows} x {inputs} -> {outputs}, {split.parts} parts",
                       microseconds=ours * 1e6, achieved=moved / ours, limit=rate, ratio=moved / ours / rate,
                       unit="bytes/s", over_torch=by_torch / ours)  # fmt: skip
