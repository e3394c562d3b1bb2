"""Host arrays to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["upload"]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`; on a CPU the tensor shares its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
