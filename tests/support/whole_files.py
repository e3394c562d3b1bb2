"""How pytest-xdist hands out the tests: whole files, so that a module's fixtures are made once; the longest first.

With `--dist loadgroup` alone the workers take the tests of a file in turns, and each makes the fixtures of its module.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling

__all__ = ["LONGEST", "WholeFiles"]

# Groups and files, by the time that they take: what begins last should be short.
LONGEST: tuple[str, ...] = (
    "e2e-models",
    "e2e-demo",
    "client",
    "real model",
    "tests/backend/loading/test_gpu_order.py",
    "tests/backend/frontend/engine_client/test_shared_engine_daemon.py",
    "tests/tools/test_launcher.py",
    "tests/tools/test_cli.py",
    "tests/backend/runner/test_parity.py",
    "tests/backend/runner/test_graph_steps.py",
    "tests/backend/runner/test_mixed_graphs.py",
    "tests/backend/kernels/test_gpu_experts_engine.py",
    "tests/backend/emulated/test_engine_on_a_card.py",
    "tests/backend/frontend/engine_client/test_shared_engine.py",
    "tests/backend/frontend/engine_client/test_engine_launcher.py",
    "tests/gpu/test_gpu_attention.py",
    "tests/gpu/test_gpu_graphs.py",
    "tests/gpu/test_gpu_experts.py",
    "tests/gpu/test_gpu_fp8.py",
    "tests/gpu/test_gpu_engine.py",
    "tests/gpu/test_gpu_int4.py",
    "tests/gpu/test_gpu_switches.py",
    "tests/gpu/test_gpu_device_runner.py",
    "tests/backend/kernels/test_cpu_attention.py",
    "tests/backend/test_hot_spare.py",
    "tests/backend/test_worker.py",
    "tests/backend/test_speculation.py",
    "tests/backend/test_packaging.py",
    "tests/backend/runner/test_generation.py",
    "tests/backend/in_process/test_lora.py",
    "tests/backend/emulated/test_pooling_on_a_card.py",
    "tests/tools/test_quantize.py",
    "tests/tools/simulator/test_sizing.py",
    "tests/loadtest/test_loadtest_report.py",
    "tests/loadtest/test_locust_web.py",
)


class WholeFiles(LoadGroupScheduling):
    """A group of `xdist_group` or else a file is what a worker takes."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        first = next((scope for scope in LONGEST if scope in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
