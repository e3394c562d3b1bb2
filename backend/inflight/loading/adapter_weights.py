"""An adapter's matrices as tensors, if each of them has a place in the model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.adapters.spec import AdapterContent, AdapterError
from inflight.adapters.tensor_header import Matrix, Pair

__all__ = ["Matrices", "adapter_matrices"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN = 4
_PIECE = 1 << 14  # elements: torch computes fewer than 32,768 in the calling thread, and more of them on all cores


@dataclass(frozen=True)
class Matrices:
    """Of one linear layer, whose output grows by `b @ a @ x`, as they are in the file.

    Attributes:
        name: of the adapter, for messages.
        pair: a [rank, in_features] and b [out_features, rank].
        scale: of b.
        data: the bytes of all tensors.
    """

    name: str
    pair: Pair
    scale: float
    data: mmap.mmap | bytearray

    def tensors(self, dtype: torch.dtype, pause: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """a and b in `dtype`; the scale is part of b, in which it is multiplied in float32.

        Args:
            pause: called after each piece of work.

        Raises:
            AdapterError: NaN or infinity.
        """
        a, b = self.stored()
        return self._converted(self.pair.a.key, a, 1.0, dtype, pause), self._converted(
            self.pair.b.key, b, self.scale, dtype, pause
        )

    def _converted(
        self, key: str, stored: Tensor, scale: float, dtype: torch.dtype, pause: Callable[[], None]
    ) -> Tensor:
        made = torch.empty(stored.shape, dtype=dtype)
        for source, target in zip(stored.reshape(-1).split(_PIECE), made.view(-1).split(_PIECE)):
            target.copy_(source if scale == 1.0 else source.float() * scale)
            if not math.isfinite(target.abs().amax().item()):  # NaN is larger than any number
                raise self.not_finite(key, dtype)
            pause()
        return made

    def stored(self) -> tuple[Tensor, Tensor]:
        """a and b in the file's dtypes, without the scale: views of `data`."""
        return _tensor(self.pair.a, self.data), _tensor(self.pair.b, self.data)

    def not_finite(self, key: str, dtype: torch.dtype) -> AdapterError:
        return AdapterError(
            f"adapter {self.name!r}: {key} contains NaN, infinity, or a number that {str(dtype)[6:]} cannot hold; "
            "train or save the adapter again"
        )


def adapter_matrices(name: str, content: AdapterContent, layers: Mapping[str, tuple[int, int]]) -> dict[str, Matrices]:
    """The matrices of each layer.

    Args:
        name: of the adapter, for messages.
        layers: inputs and outputs of the model's layers that can have an adapter, by their paths.

    Raises:
        AdapterError: a matrix is of no layer, of one that has another, or of another shape.
    """
    found: dict[str, Matrices] = {}
    for module, pair in content.pairs.items():
        path = _path(name, module, pair.a.key, layers)
        if path in found:
            raise AdapterError(
                f"adapter {name!r}: {found[path].pair.a.key} and {pair.a.key} are both of the layer {path}; save the "
                "adapter again"
            )
        in_features, out_features = layers[path]
        for matrix, shape in ((pair.a, (pair.rank, in_features)), (pair.b, (out_features, pair.rank))):
            if matrix.shape != shape:
                raise AdapterError(
                    f"adapter {name!r}: {matrix.key} has shape {list(matrix.shape)}, and the model's layer takes "
                    f"{list(shape)}; the adapter is of another model"
                )
        found[path] = Matrices(name, pair, content.scales[module], content.data)
    return found


def _path(name: str, module: str, key: str, layers: Mapping[str, tuple[int, int]]) -> str:
    """The layer's path; an adapter of a model without a head has paths without "model.", as transformers names it."""
    for path in (module, f"model.{module}"):
        if path in layers:
            return path
    last = module.rsplit(".", 1)[-1]
    if "experts" in module.split("."):
        raise AdapterError(f"adapter {name!r}: {key} adapts experts, which is not served; merge it into the checkpoint")
    same = sorted(path for path in layers if path.rsplit(".", 1)[-1] == last)
    known = same or sorted({path.rsplit(".", 1)[-1] for path in layers})
    more = ", ..." if len(known) > _SHOWN else ""
    raise AdapterError(
        f"adapter {name!r}: {key} is of no layer of the model that can have an adapter: those are "
        f"{', '.join(known[:_SHOWN])}{more}; the adapter is of another model, or adapts other parts of it"
    )


def _tensor(matrix: Matrix, data: mmap.mmap | bytearray) -> Tensor:
    """A view; but a copy of what is at no multiple of its elements' size."""
    dtype = _DTYPES[matrix.dtype]
    if matrix.start % dtype.itemsize:
        return torch.frombuffer(bytearray(memoryview(data)[matrix.start : matrix.stop]), dtype=dtype).view(matrix.shape)
    count = matrix.shape[0] * matrix.shape[1]
    return torch.frombuffer(data, dtype=dtype, count=count, offset=matrix.start).view(matrix.shape)
