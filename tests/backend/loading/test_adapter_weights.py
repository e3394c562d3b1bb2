"""An adapter's matrices and the layers that they belong to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.adapters.spec import CONFIG, WEIGHTS, AdapterError, describe_adapter, read_adapter
from inflight.loading.adapter_weights import adapter_matrices

GRAIN = 32_768  # elements from which torch computes on all cores


def test_two_matrices_of_one_layer_are_refused_by_their_keys(tmp_path: Path) -> None:
    """A model without a head has paths without "model."; one of the two would silently be left out."""
    keys = "base_model.model.layers.0.q_proj", "base_model.model.model.layers.0.q_proj"
    shapes = {"lora_A": (2, 8), "lora_B": (6, 2)}
    save_file(
        {f"{key}.{half}.weight": np.ones(shape, np.float32) for key in keys for half, shape in shapes.items()},
        tmp_path / WEIGHTS,
    )
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}')
    content = read_adapter(describe_adapter(tmp_path, "mine", 8), 8)
    layers = {"model.layers.0.q_proj": (8, 6)}
    said = f"'mine': {keys[0]}.lora_A.weight and {keys[1]}.lora_A.weight are both of the layer model.layers.0.q_proj"
    with pytest.raises(AdapterError, match=re.escape(said)):
        adapter_matrices("mine", content, layers)


class LargestResult(TorchDispatchMode):
    """How many elements the largest operation since `reset` has computed or read, and the number of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.elements = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in VIEWS:
            sizes = [one.numel() for one in (*args, found) if isinstance(one, torch.Tensor)]
            self.elements, self.operations = max(self.elements, *sizes), self.operations + 1
        return found


VIEWS = {torch.ops.aten.view.default, torch.ops.aten.split.Tensor, torch.ops.aten.empty.memory_format}


@pytest.mark.parametrize("alpha", [4, 10])
def test_a_large_pair_is_converted_in_pieces_that_one_thread_computes(tmp_path: Path, alpha: int) -> None:
    """Threads of torch would take all cores from the steps, and `LoaderPace` would not know."""
    rng, module = np.random.default_rng(0), "model.layers.0.q_proj"
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 20_000), (30_001, 4)))
    save_file(
        {f"base_model.model.{module}.lora_{half}.weight": one for half, one in (("A", a), ("B", b))}, tmp_path / WEIGHTS
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    content = read_adapter(describe_adapter(tmp_path, "mine", 8), 8)
    matrices = adapter_matrices("mine", content, {module: (20_000, 30_001)})[module]
    slices: list[tuple[int, int]] = []
    with LargestResult() as largest:

        def pause() -> None:
            slices.append((largest.elements, largest.operations))
            largest.reset()

        made = matrices.tensors(torch.bfloat16, pause)
    assert len(slices) == 5 + 8 and 16_000 < max(size for size, _ in slices) < GRAIN
    assert max(count for _, count in slices) < 10 and largest.operations == 0
    for found, wanted in zip(made, (torch.from_numpy(a), torch.from_numpy(b) * (alpha / 4))):
        assert torch.equal(found, wanted.to(torch.bfloat16))
