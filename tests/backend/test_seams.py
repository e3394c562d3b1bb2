"""At a seam a Protocol names what it needs: nothing asks for an attribute that may be missing, or for a type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from source_tree import source_tree

BACKEND = Path(__file__).parents[2] / "backend" / "inflight"
# The rooms of the seams; loading and kernels look at modules of transformers, whose attributes are theirs to have.
SEAMS = [
    *(BACKEND / room for room in ("engine", "runner", "sampling", "attention", "ops", "device")),
    BACKEND / "in_process" / "local_engine.py",
    BACKEND / "worker.py",
]
# Plain data may be told apart: an answer, a message, an error.
DATA = {
    "AbortRequest",
    "AddRequest",
    "Answer",
    "Ask",
    "Exception",
    "Joined",
    "Left",
    "MemoryError",
    "NotYet",
    "OSError",
    "Request",
    "RequestFailed",
    "SamplingParams",
    "TimeoutError",
    "TornError",
    "str",
    "torch.OutOfMemoryError",
}
# Places where the other side is not ours to define.
EXCEPTIONS = {
    "runner/capture.py: isinstance(beside, _CudaGraph)",  # a graph of this capturer, asserted
}


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(source_tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


def offences(path: Path) -> Iterator[str]:
    for call in calls(path):
        assert isinstance(call.func, ast.Name)
        name, shown = call.func.id, f"{path.relative_to(BACKEND)}: {ast.unparse(call)}"
        if shown in EXCEPTIONS:
            continue
        if (name == "getattr" and len(call.args) == 3) or name == "hasattr":
            yield shown
        if name == "isinstance":
            kinds = call.args[1].elts if isinstance(call.args[1], ast.Tuple) else [call.args[1]]
            if any(ast.unparse(kind) not in DATA for kind in kinds):
                yield shown


def test_no_seam_asks_for_a_missing_attribute_or_a_type() -> None:
    files = [file for room in SEAMS for file in ([room] if room.suffix else sorted(room.rglob("*.py")))]
    assert len(files) > 100
    assert [offence for file in files for offence in offences(file)] == []
