"""Compiles the launched kernels in the Triton language for a GPU that need not be present.

Run it in a separate process, without TRITON_INTERPRET.  The compiler asks a *driver* for the target and passes it the
result.  The driver here names the target it was given, records the compiled kernels and launches nothing.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from inflight.kernels.gpu.gpu_attention_configs import Card

SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB per block, from NVIDIA's tables


def card(arch: int) -> Card:
    return Card(divmod(arch, 10), SMS[arch], SHARED_MEMORY[arch] * 1024)


@dataclass
class Compiled:
    """One compiled kernel."""

    name: str
    constants: dict[str, Any]
    types: dict[str, str]
    num_warps: int
    shared: int
    ptx: str
    cubin: bytes
    launch_pdl: bool

    def resources(self) -> tuple[int, int]:
        """Registers per thread, and bytes of its stack, which contains spilled registers."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(tool), "--dump-resource-usage", file.name]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.findall(r"REG:(\d+)", output), re.findall(r"STACK:(\d+)", output)
        return int(registers[-1]), int(stack[-1])

    def report(self, arch: int) -> dict[str, Any]:
        registers, stack = self.resources()
        chosen = {key.lower(): self.constants[key] for key in ("BLOCK_M", "BLOCK_N") if key in self.constants}
        products = sorted(set(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|cp\.async\.cg)", self.ptx)))
        return dict(
            kernel=self.name,
            **chosen,
            warps=self.num_warps,
            registers=registers,
            stack_bytes=stack,
            shared_bytes=self.shared,
            shared_limit=SHARED_MEMORY[arch] * 1024,
            tf32="tf32" in self.ptx,
            instructions=products,
            overlapped=self.overlapped(),
        )

    def overlapped(self) -> int:
        """Exponentials that are computed while products of wgmma are under way."""
        count, is_under_way = 0, False
        for name in re.findall(r"\b(wgmma\.commit_group|wgmma\.wait_group|ex2\.approx)", self.ptx):
            if name == "ex2.approx":
                count += is_under_way
            else:
                is_under_way = name == "wgmma.commit_group"
        return count


class _Driver:
    """The part of a driver that a launch uses."""

    def __init__(self, arch: int, compiled: list[Compiled]) -> None:
        self.arch = arch
        self.compiled = compiled
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.arch] * 1024}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None


@contextlib.contextmanager
def target(arch: int) -> Iterator[list[Compiled]]:
    """Within the block, launches compile for `arch` and do nothing else; yields the list of compiled kernels."""
    compiled: list[Compiled] = []
    driver = _Driver(arch, compiled)

    def keep(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        kernel = triton.compiler.CompiledKernel(src, metadata_group, metadata["hash"])
        names = src.fn.arg_names
        constants = {names[path[0]]: value for path, value in src.constants.items()}
        compiled.append(
            Compiled(
                kernel.name,
                constants,
                dict(src.signature),
                kernel.metadata.num_warps,
                kernel.metadata.shared,
                kernel.asm["ptx"],
                kernel.asm["cubin"],
                kernel.metadata.launch_pdl,
            )
        )

    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.listener = keep
    try:
        yield compiled
    finally:
        triton.knobs.compilation.listener = None
