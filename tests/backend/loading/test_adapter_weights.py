"""An adapter's matrices and the layers that they belong to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from inflight.adapters.spec import CONFIG, WEIGHTS, AdapterError, describe_adapter, read_adapter
from inflight.loading.adapter_weights import adapter_matrices


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
