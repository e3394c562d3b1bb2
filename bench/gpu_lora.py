"""Stage `lora`: adapters in decode steps, over the same steps of an engine without LoRA, and the kernels alone.

An engine without LoRA is measured first; then, of one with it, batches of the same rows: without adapters, with one in
all rows, with eight in turn.  All adapters have rank 16 on every linear layer of the decoder.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_rates
import msgspec
import torch
from gpu_decode import decode_steps, run_steps
from gpu_model import engine, llama_8b, qwen3_06b, refused, words
from gpu_rows import Run
from safetensors.torch import save_file

from inflight.adapters.spec import CONFIG, WEIGHTS, describe_adapter
from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.kernels.gpu.gpu_lora import GpuLora
from inflight.ops.lora import LoraSlots, ReferenceLora

__all__ = ["lora"]

_ADAPTERS, _RANK, _LAYERS = 8, 16, 16
_STEPS, _WARM_UP, _CONTEXT = 60, 4, 512
_SECONDS = 15  # for one model: two engines and their captures
_TARGETS = {("unused", 64): 0.99, ("one adapter", 64): 0.93, ("8 adapters", 16): 0.85, ("8 adapters", 64): 0.9}
_ERROR_LIMIT = 0.01  # relative, of 16 bits


def lora(run: Run) -> Iterator[dict[str, Any]]:
    """Rows of the kernels, then of the steps of a 0.6B and of half an 8B."""
    yield from _kernel_rows(run)
    for model in (qwen3_06b, llama_8b):
        config = model(run)
        config.num_hidden_layers = min(config.num_hidden_layers, _LAYERS if model is llama_8b else 2**10)
        name = f"lora {words(config)}"
        if run.seconds_left < (1 if run.tiny else _SECONDS):
            yield dict(name=name, shape="", status="left out", why="no time left")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield from _step_rows(run, config, name, _adapters(config, Path(folder)))
        except Exception as error:  # a model that fails does not take the other along
            traceback.print_exc()
            yield refused(error, name, "")


def _step_rows(run: Run, config: Any, name: str, refs: list[AdapterRef]) -> Iterator[dict[str, Any]]:
    batches = (2,) if run.tiny else (16, 64, 256)
    steps = 2 if run.tiny else _STEPS
    context = 8 if run.tiny else _CONTEXT
    options: dict[str, Any] = dict(max_num_seqs=batches[-1], max_model_len=context + _WARM_UP + steps)
    if run.tiny:
        options["num_gpu_blocks_override"] = 64

    def timed(core: EngineCore, rows: int, chosen: list[AdapterRef | None]) -> float:
        outs = decode_steps(core, rows, context, _WARM_UP + steps)
        outs[0].new_rows = [
            msgspec.structs.replace(row, attached=Attached(adapter=chosen[i % len(chosen)]))
            for i, row in enumerate(outs[0].new_rows)
        ]
        run_steps(core, outs[:_WARM_UP])
        return run_steps(core, outs[_WARM_UP:])

    with engine(run, config, **options) as core:
        base = {rows: min(timed(core, rows, [None]) for _ in range(2)) for rows in batches}
    sides = {"unused": [None], "one adapter": refs[:1], f"{len(refs)} adapters": refs}
    with engine(run, config, enable_lora=True, max_loras=len(refs), max_lora_rank=_RANK, **options) as core:
        assert core.info.adapters is not None
        for ref in refs:
            core.info.adapters.load(ref).result(60)
        for rows in batches:
            for side, chosen in sides.items():
                spent = min(timed(core, rows, [*chosen]) for _ in range(2))
                row: dict[str, Any] = dict(name=f"{name}, {side}", shape=f"{rows} rows", achieved=spent * 1e3,
                                           limit=base[rows] * 1e3, ratio=base[rows] / spent, unit="ms",
                                           note="a step, over one without LoRA")  # fmt: skip
                target = None if run.tiny else _TARGETS.get((side, rows))
                yield row | ({} if target is None else dict(target=target, passed=row["ratio"] >= target))


def _adapters(config: Any, folder: Path) -> list[AdapterRef]:
    """Of the same matrices, and different scales: so they are different adapters."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    sizes = {"self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key), "self_attn.v_proj": (hidden, key)}
    sizes |= {"self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner)}
    sizes["mlp.down_proj"] = inner, hidden
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = (torch.randn(_RANK, inputs) * inputs**-0.5).bfloat16()
            tensors[f"{path}.lora_B.weight"] = (torch.randn(outputs, _RANK) * 0.1).bfloat16()
    save_file(tensors, folder / WEIGHTS)
    refs = []
    for number in range(_ADAPTERS):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / WEIGHTS).hardlink_to(folder / WEIGHTS)
        targets = [name.rsplit(".", 1)[1] for name in sizes]
        values = dict(peft_type="LORA", r=_RANK, lora_alpha=_RANK + number, target_modules=targets)
        (own / CONFIG).write_text(json.dumps(values))
        refs.append(describe_adapter(own, own.name, _RANK))
    return refs


def _kernel_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Kernels on the merged query, key and value of Llama 3 8B: errors, then times over reading A and B.

    The matrices remain in the L2 cache, as those of a real step do not, so these times are the least.
    """
    device = torch.device(run.device)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter has no bfloat16
    num_inputs, sizes = (256, (64, 32, 32)) if run.tiny else (4096, (4096, 1024, 1024))
    batches = (2,) if run.tiny else (1, 16, 64, 256, 2048)
    read, ops = gpu_rates.measured(run)["read"], GpuLora()
    slots = LoraSlots(
        torch.randn(_ADAPTERS, 3 * _RANK, num_inputs, device=device).mul_(num_inputs**-0.5).to(dtype),
        torch.randn(_ADAPTERS, sum(sizes), _RANK, device=device).to(dtype),
        sizes,
    )
    ops.prepare(slots, batches[-1])
    of_slot = (slots.a[0].nbytes + slots.b[0].nbytes) or 1
    for count in batches:
        x, y = (torch.randn(count, size, device=device).to(dtype) for size in (num_inputs, sum(sizes)))
        for adapters in (1, _ADAPTERS):
            of_token = (torch.arange(count, device=device) % adapters).int()
            shape = f"{count} x {num_inputs} -> {sum(sizes)}, {adapters} of {_ADAPTERS} adapters"
            found, expected = y.clone(), y.float()
            ops.add(x, slots, of_token, found)
            ReferenceLora().add(x, slots, of_token, expected)
            error = ((found.float() - expected).norm() / expected.norm()).item()
            yield dict(name="lora, is right", shape=shape, achieved=error, limit=_ERROR_LIMIT,
                       ratio=error / _ERROR_LIMIT, unit="error", passed=error <= _ERROR_LIMIT)  # fmt: skip
            spent = gpu_rates.seconds([partial(ops.add, x, slots, of_token, found)] * 4, device)
            rate = min(adapters, count) * of_slot / spent
            yield dict(name="lora, shrink and expand", shape=shape, microseconds=spent * 1e6, achieved=rate,
                       limit=read, ratio=rate / read, unit="bytes/s")  # fmt: skip
