"""An adapter's matrices as tensors, if each of them has a place in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.adapters.spec import AdapterContent, AdapterError
from inflight.adapters.tensor_header import Matrix

__all__ = ["Matrices", "adapter_matrices"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN = 4


@dataclass(frozen=True)
class Matrices:
    """Of one linear layer, whose output grows by `b @ a @ x`.

    Attributes:
        a: [rank, in_features].
        b: [out_features, rank]; the scale is part of it.
    """

    a: Tensor
    b: Tensor


def adapter_matrices(
    name: str, content: AdapterContent, layers: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> dict[str, Matrices]:
    """The matrices of each layer, in `dtype`.

    Args:
        name: of the adapter, for messages.
        layers: inputs and outputs of the model's layers that can have an adapter, by their paths.

    Raises:
        AdapterError: a matrix is of no layer, of one that has another, of another shape, or contains NaN or infinity.
    """
    found: dict[str, Matrices] = {}
    keys: dict[str, str] = {}
    for module, pair in content.pairs.items():
        path = _path(name, module, pair.a.key, layers)
        other = keys.setdefault(path, pair.a.key)
        if other != pair.a.key:
            raise AdapterError(
                f"adapter {name!r}: {other} and {pair.a.key} are both of the layer {path}; save the adapter again"
            )
        in_features, out_features = layers[path]
        for matrix, shape in ((pair.a, (pair.rank, in_features)), (pair.b, (out_features, pair.rank))):
            if matrix.shape != shape:
                raise AdapterError(
                    f"adapter {name!r}: {matrix.key} has shape {list(matrix.shape)}, and the model's layer takes "
                    f"{list(shape)}; the adapter is of another model"
                )
        a, b = _tensor(pair.a, content.data), _tensor(pair.b, content.data).float() * content.scales[module]
        found[path] = Matrices(_finite(name, pair.a.key, a.to(dtype)), _finite(name, pair.b.key, b.to(dtype)))
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


def _tensor(matrix: Matrix, data: bytes | bytearray) -> Tensor:
    part = bytearray(memoryview(data)[matrix.start : matrix.stop])
    return torch.frombuffer(part, dtype=_DTYPES[matrix.dtype]).view(matrix.shape)


def _finite(name: str, key: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise AdapterError(
            f"adapter {name!r}: {key} contains NaN, infinity, or a number that {str(tensor.dtype)[6:]} cannot hold; "
            "train or save the adapter again"
        )
    return tensor
