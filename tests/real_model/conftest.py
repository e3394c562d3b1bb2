"""SmolLM2-135M-Instruct in one process of the suite: transformers' answers, and engines.  `make smollm2` makes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers_answers import Answers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "bench"))  # scripts that import one another by name


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("real model"))


@pytest.fixture(scope="session")
def answers(smollm2: Path) -> Answers:
    torch.set_num_threads(1)
    return Answers(smollm2)
