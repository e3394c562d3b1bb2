"""Adapters of a model on a GPU: slots that are allocated once, and kernels that add what each row's slot adds.

A slot has room for the matrices of one adapter, of all layers, in one piece; the adapters in host memory have the same
layout, so that one copy fills a slot, beside the steps that do not read it (`SlotCopies`).

The slots' addresses, and those of the tokens' slots, never change, so that CUDA graphs can read them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inflight.byte_sizes import format_bytes
from inflight.device.device_queue import queue_of
from inflight.kernels.registry import select_lora
from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward.adaptable_layers import called_with_all, linears_of, module_of, sizes_of
from inflight.loading.forward.fused_decoder import projections_of
from inflight.loading.forward.slot_copies import SlotCopies
from inflight.loading.load_errors import LoadError, in_one_line
from inflight.loading.recognise.projection import Added, Projection, takes_quantized
from inflight.ops.lora import LoraOps, LoraSlots, ReferenceLora, padded_rank

__all__ = ["DeviceAdapters"]

_ALIGNED = 64  # elements: every matrix begins at a multiple of 16 bytes
# Of what a kernel adds, relative: in units of the dtype's rounding; and of float32's, times the root of what it sums.
_TOLERANCE, _SUM_TOLERANCE = 8, 1


@dataclass(frozen=True)
class _Product:
    """One product of the model: of several layers with a common input, or of one.

    Attributes:
        paths: of the layers.
        sizes: outputs of each.
        a, b: where the matrices of a slot begin.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    num_inputs: int
    a: int
    b: int

    def slots(self, values: Tensor, rank: int) -> LoraSlots:
        """Views of `values` [S, elements of a slot]."""
        width, num_outputs = len(self.paths) * rank, sum(self.sizes)
        a = values[:, self.a : self.a + width * self.num_inputs].view(-1, width, self.num_inputs)
        b = values[:, self.b : self.b + num_outputs * rank].view(-1, num_outputs, rank)
        return LoraSlots(a, b, self.sizes)


@dataclass(frozen=True, eq=False)
class _Packed:
    """An adapter as it lies in a slot.

    Attributes:
        values: [elements of a slot], pinned.  torch's allocator of pinned memory gives it to no other tensor before the
            device has made the copies from it.
    """

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class DeviceAdapters:
    """Implements `AdaptedModel`.

    Args:
        model: transformers' module, perhaps with fused operations, on its device.
        dtype: of the inputs of its layers.
        max_adapters: slots.
        max_rank: of an adapter.
        max_tokens: of a step.
        trial: runs the model over a few tokens, and returns how many.

    Raises:
        LoadError: the slots do not fit the device's memory, or a layer's format is not served.
    """

    capturable = True

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device,
        max_adapters: int,
        max_rank: int,
        max_tokens: int,
        trial: Callable[[], int],
    ) -> None:
        self.dtype = dtype
        self.max_adapters: int | None = max_adapters
        self._device, self._queue, self._rank = device, queue_of(device), padded_rank(max_rank)
        module = module_of(model)
        if any(map(takes_quantized, module.modules())):
            raise LoadError(
                "enable_lora=True on a GPU is not served with weights in fp8 whose inputs are quantized, too: remove "
                'quantization "fp8", or serve another checkpoint; "int4" and plain weights take adapters'
            )
        linears, projections = _adaptable(module, trial)
        self._products: list[_Product] = []
        self._size = 0  # elements of a slot
        paths = {layer: path for path, layer in module.named_modules()}
        for projection in projections:
            self._add_product([paths[layer] for layer in projection.linears], projection.linears)
        for path, layer in linears.items():
            self._add_product([path], [layer])
        self.layers: Mapping[str, tuple[int, int]] = {
            path: (product.num_inputs, size)
            for product in self._products
            for path, size in zip(product.paths, product.sizes)
        }
        self._allocate(max_adapters, max_rank, max_tokens)
        places: list[Callable[[Added], None]] = [each.attach for each in projections]
        places += [partial(_attach, layer) for layer in linears.values()]
        for product, attach in zip(self._products, places):
            attach(partial(self._added, product.paths, product.slots(self._slots, self._rank)))

    def _add_product(self, paths: Sequence[str], layers: Sequence[nn.Module]) -> None:
        sizes = [sizes_of(layer) for layer in layers]
        num_inputs, outputs = sizes[0][0], tuple(size for _, size in sizes)
        a = self._size
        b = _aligned(a + len(paths) * self._rank * num_inputs)
        self._size = _aligned(b + sum(outputs) * self._rank)
        self._products.append(_Product(tuple(paths), outputs, num_inputs, a, b))

    def _allocate(self, max_adapters: int, max_rank: int, max_tokens: int) -> None:
        num_bytes = max_adapters * self._size * self.dtype.itemsize
        self._ops: LoraOps = select_lora(self._device)
        try:
            self._slots = torch.zeros(max_adapters, self._size, dtype=self.dtype, device=self._device)
            for product in self._products:
                self._ops.prepare(product.slots(self._slots, self._rank), max_tokens)
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"{max_adapters} adapters of rank {max_rank} take {format_bytes(num_bytes)}, which the GPU has "
                "not left beside the weights; lower max_loras or max_lora_rank"
            ) from error
        self.nbytes = num_bytes
        self._copies = SlotCopies(self._slots)
        self._of_token = torch.full((max_tokens,), -1, dtype=torch.int32, device=self._device)
        self._num_written = 0  # leading elements of it that can be of an adapter
        self._num_tokens = 0  # of the forward pass, if its rows have adapters
        self._held: OrderedDict[int, _Packed | None] = OrderedDict.fromkeys(range(max_adapters))  # used last: last

    def pack(self, matrices: Mapping[str, Matrices], pause: Callable[[], None]) -> _Packed:
        values = self._queue.host_buffer(self._size * self.dtype.itemsize).zero_().view(self.dtype)[None]
        for product in self._products:
            slots = product.slots(values, self._rank)
            for part, (path, start) in enumerate(zip(product.paths, slots.starts)):
                if path in matrices:
                    a, b = matrices[path].tensors(self.dtype, pause)
                    slots.a[0, part * self._rank :][: len(a)] = a
                    slots.b[0, start : start + len(b), : b.shape[1]] = b
            pause()
        return _Packed(values[0])

    @torch.inference_mode()
    def set_rows(self, adapters: Sequence[_Packed | None], num_tokens: Sequence[int]) -> None:
        self._copies.step_begins()
        used = {id(adapter): adapter for adapter in adapters if adapter is not None}
        if not used:
            if self._num_written:  # rows of a step that failed on the host can make this one count as adapted
                self._of_token[: self._num_written].fill_(-1)
                self._num_written = 0
            return
        slots = self._slots_of(used)
        of_row = np.array([-1 if adapter is None else slots[id(adapter)] for adapter in adapters], dtype=np.int32)
        of_token = np.repeat(of_row, num_tokens)
        count = max(len(of_token), self._num_written)
        values = torch.full((count,), -1, dtype=torch.int32)
        values[: len(of_token)] = torch.from_numpy(of_token)
        if self._device.type == "cuda":
            values = values.pin_memory()
        self._of_token[:count].copy_(values, non_blocking=True)
        self._num_written = len(of_token)

    def expect(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def _slots_of(self, used: Mapping[int, _Packed]) -> dict[int, int]:
        """The slot of each adapter, by its `id`; an adapter in none takes the slot that was used longest ago."""
        found = {id(held): slot for slot, held in self._held.items() if held is not None and id(held) in used}
        for slot in found.values():
            self._held.move_to_end(slot)
        for key, adapter in used.items():
            if key not in found:
                slot = found[key] = next(slot for slot in self._held if slot not in found.values())
                self._held[slot] = None  # until the copy is queued
                self._held.move_to_end(slot)
                self._copies.fill(slot, adapter.values)
                self._held[slot] = adapter
        self._copies.step_reads(list(found.values()))
        return found

    def _added(self, paths: Sequence[str], slots: LoraSlots, x: Tensor, y: Tensor) -> Tensor:
        """y [..., N], what the layers at `paths` have computed of x [..., K], with what the adapters add, in place."""
        if not self._num_tokens:
            return y
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if len(inputs) != self._num_tokens:
            raise RuntimeError(f"{paths[0]} was called with {len(inputs)} rows in place of {self._num_tokens} tokens")
        self._ops.add(inputs, slots, self._of_token[: len(inputs)], outputs)
        return y

    @torch.inference_mode()
    def verify(self) -> None:
        """Compile the kernels, and compare what they add with the definition, for products of each size.

        Raises:
            LoadError: they fail, or differ.
        """
        seen = set()
        for product in self._products:
            if (kind := (product.num_inputs, product.sizes)) in seen:
                continue
            seen.add(kind)
            slots = product.slots(self._slots, self._rank)
            for matrix in (slots.a[-1], slots.b[-1]):
                matrix.copy_(_random(matrix, matrix.shape[-1]))
            why = _wrong(self._ops, slots, len(self._of_token))
            for matrix in (slots.a[-1], slots.b[-1]):
                matrix.zero_()
            self._copies.written()
            if why is not None:
                raise LoadError(f"enable_lora=True does not work here: {product.paths[0]}: {why}; remove it")


def _adaptable(module: Any, trial: Callable[[], int]) -> tuple[dict[str, nn.Module], list[Projection]]:
    """The layers that can have an adapter, and the products of several layers that can."""
    projections = projections_of(module)
    merged = {layer for projection in projections for layer in projection.linears}
    linears = {path: layer for path, layer in linears_of(module).items() if layer not in merged}
    rows: dict[int, set[int]] = {id(projection): set() for projection in projections}

    def noted(key: int, x: Tensor, y: Tensor) -> Tensor:
        rows[key].add(x.numel() // x.shape[-1])
        return y

    for projection in projections:
        projection.attach(partial(noted, id(projection)))
    num_tokens = 0

    def run() -> int:
        nonlocal num_tokens
        num_tokens = trial()
        return num_tokens

    called = called_with_all(linears, run)
    for projection in projections:
        projection.attach(None)
    return (
        {path: linears[path] for path in called},
        [projection for projection in projections if rows[id(projection)] == {num_tokens}],
    )


def _attach(layer: nn.Module, added: Added) -> None:
    layer.register_forward_hook(lambda layer, inputs, output: added(inputs[0], output))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _random(like: Tensor, depth: int) -> Tensor:
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)) * depth**-0.5
    return values.to(device=like.device, dtype=like.dtype)


def _wrong(ops: LoraOps, slots: LoraSlots, max_tokens: int) -> str | None:
    """How the kernels fail or differ in the last slot, if they do: a tile for a few rows, and one for many."""
    last = LoraSlots(slots.a[-1:], slots.b[-1:], slots.sizes)
    depth = slots.a.shape[2]
    for count in (2, 65):
        if count > max_tokens:
            continue
        x = _random(slots.a.new_empty(count, depth), 1)
        of_token = torch.full((count,), len(slots.a) - 1, dtype=torch.int32, device=x.device)
        of_token[0] = -1
        results = [torch.zeros(count, sum(slots.sizes), dtype=x.dtype, device=x.device) for _ in range(2)]
        try:
            ops.add(x, slots, of_token, results[0])
        except Exception as error:  # of the compiler, or of a launch
            return in_one_line(error)
        ReferenceLora().add(x, last, of_token.clamp(max=0), results[1])
        found, expected = (result.float() for result in results)
        off = ((found - expected).norm() / expected.norm()).item()
        rounding, summing = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps * depth**0.5
        if not off <= _TOLERANCE * rounding + _SUM_TOLERANCE * summing:
            return f"what an adapter adds to {count} rows differs by {off:.2g}, relative, from its definition"
    return None
