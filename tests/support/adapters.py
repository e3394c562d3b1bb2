"""Random LoRA adapters in PEFT's format, and checkpoints that they are merged into."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCAB
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from inflight.adapters.spec import CONFIG, WEIGHTS, describe_adapter
from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached

__all__ = ["attached", "linear_sizes", "make_adapter", "merged_checkpoint"]


def linear_sizes(checkpoint: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer but the head, by its path."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = {}
    for name, module in model.named_modules():
        if module is model.get_output_embeddings():
            continue
        if isinstance(module, nn.Linear):
            found[name] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            found[name] = module.nx, module.nf
    return found


def make_adapter(
    folder: Path,
    checkpoint: str,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 6.0,
    strength: float = 0.4,
    prefix: str = "base_model.model.",
    **config: Any,
) -> AdapterRef:
    """Write an adapter of the linear layers of `checkpoint`.

    Args:
        targets: last names of the layers; None: all of them.
        strength: standard deviation of the matrices; an adapter must change what the model says.
        config: more keys of adapter_config.json.  Ranks follow `rank_pattern`.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = linear_sizes(checkpoint)
    chosen = [path for path in sizes if targets is None or path.rsplit(".", 1)[-1] in targets]
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in chosen}),
        "use_dora": False,
        "modules_to_save": None,
        "peft_version": "0.18.0",
        **config,
    }
    tensors = {}
    for path in chosen:
        layers = values.get("layers_to_transform")
        if layers is not None and int(re.findall(r"\.(\d+)\.", path)[0]) not in layers:
            continue
        own = _value(values.get("rank_pattern"), path, rank)
        inputs, outputs = sizes[path]
        for half, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            matrix = torch.randn(shape, generator=generator) * strength / math.sqrt(shape[1])
            tensors[f"{prefix}{path}.lora_{half}.weight"] = matrix
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(values))
    return describe_adapter(folder, folder.name, 64)


def merged_checkpoint(checkpoint: str, adapter: AdapterRef, folder: Path) -> str:
    """A copy of the checkpoint with W + scale B A in place of W, as PEFT's `merge_and_unload` makes it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = json.loads((Path(adapter.path) / CONFIG).read_text())
    tensors = load_file(Path(adapter.path) / WEIGHTS)
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, alpha = len(a), _value(config.get("alpha_pattern"), path, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = scale * (tensors[key.replace("lora_A", "lora_B")].double() @ a.double())
        module = model.get_submodule(path)
        delta = delta.t() if isinstance(module, Conv1D) else delta
        module.weight.data = (module.weight.data.double() + delta).float()
    model.save_pretrained(folder)
    return str(folder)


def attached(adapter: AdapterRef | None) -> Attached | None:
    return None if adapter is None else Attached(adapter=adapter)


def _value(pattern: dict[str, Any] | None, path: str, otherwise: Any) -> Any:
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return otherwise


__all__ += ["VOCAB"]
