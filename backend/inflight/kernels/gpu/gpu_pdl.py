"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

A launch with `launch_pdl` does not wait for the end of the kernel before it.  Its programs start as soon as all of that
kernel's have said that dependents may launch, or ended; then they wait where they say so.  Three rules keep it correct:

- A kernel waits before it reads or writes anything that another kernel writes or reads: `begin` is its first statement.
- *Every* program waits, also one without work: the wait of the kernel behind it covers the kernels before it only if
  each of them has ended before its successor does.
- A kernel that is launched without it (cuBLAS, torch) starts when the one before it has ended, as ever.

NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, `griddepcontrol`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inflight.kernels.gpu.launch import interpreted

__all__ = ["begin", "pdl_options"]


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start; nothing without PDL."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def pdl_options(launch_pdl: bool) -> dict[str, Any]:
    """Keywords of a launch of a kernel that calls `begin`.  The interpreter runs one kernel after the other."""
    is_on = launch_pdl and not interpreted()
    return {"PDL": True, "launch_pdl": True} if is_on else {}
