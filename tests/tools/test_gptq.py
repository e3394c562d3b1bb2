"""GPTQ against a straightforward implementation, and its codes as files store them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_quantized import decoded
from torch import Tensor

from inflight.loading.checkpoint.compressed_format import CompressedFormat
from inflight.loading.quantization.packing import Header
from inflight_tools.quantize.compressed import quantization_config, tensors_of
from inflight_tools.quantize.decoder_walk import Scheme
from inflight_tools.quantize.gptq import Codes, Hessian, Undefined, gptq, grid_of

SAFETENSORS = {torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16", torch.float16: "F16"}


def case(num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Hessian]:
    """A weight, correlated inputs with a few outliers, and their X^T X."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    mixed = torch.randn(num_inputs, num_inputs, generator=generator) / num_inputs**0.5
    x = torch.randn(512, num_inputs, generator=generator) @ mixed
    x[:, ::37] *= 8
    hessian = Hessian(num_inputs)
    for part in x.split(200):
        hessian.add(part)
    return weight, x, hessian


def plainly(weight: Tensor, x: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The codes and the weights that they are, column by column in float64, by the inverse of H."""
    top, w, wide = 2**bits - 1, weight.double().numpy().copy(), x.double().numpy()
    h = wide.T @ wide
    importance = np.diag(h).copy()
    h += 0.01 * np.diag(h).mean() * np.eye(len(h))
    inverse = np.linalg.inv(h)
    codes, rounded = np.zeros(w.shape, dtype=np.int64), np.zeros_like(w)
    for k in range(w.shape[1]):
        if k % group == 0:
            scales, zeros = [], []
            for row in w[:, k : k + group]:
                tried = []
                for share in [1 - step / 20 for step in range(9)]:
                    low, high = min(row.min(), 0) * share, max(row.max(), 0) * share
                    scale = float(torch.tensor((high - low) / top).to(dtype))
                    zero = np.clip(np.rint(-low / scale), 0, top)
                    off = (np.clip(np.rint(row / scale) + zero, 0, top) - zero) * scale - row
                    tried.append((float((off**2 * importance[k : k + group]).sum()), -share, scale, zero))
                _, _, scale, zero = min(tried)
                scales.append(scale)
                zeros.append(zero)
            scale, zero = np.array(scales), np.array(zeros)
        codes[:, k] = np.clip(np.rint(w[:, k] / scale) + zero, 0, top)
        rounded[:, k] = (codes[:, k] - zero) * scale
        error = (w[:, k] - rounded[:, k]) / inverse[k, k]
        w -= np.outer(error, inverse[k])  # columns that are done have no part in `inverse` any more
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return codes, rounded


def nearest(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Weights rounded on the same grids, each for itself."""
    parts = []
    for part in weight.t().split(group):
        scale, zero = (x.float() for x in grid_of(part, torch.ones(group), bits, dtype))
        parts.append(((part / scale).round() + zero).clamp(0, 2**bits - 1).sub(zero).mul(scale))
    return torch.cat(parts).t()


@pytest.mark.parametrize(("group", "num_inputs", "dtype"), [(32, 160, torch.bfloat16), (128, 256, torch.float16)])
def test_the_codes_are_those_of_a_straightforward_implementation(
    group: int, num_inputs: int, dtype: torch.dtype
) -> None:
    weight, x, hessian = case(12, num_inputs)
    found = gptq(weight, hessian, 4, group, dtype)
    codes, rounded = plainly(weight, x, 4, group, dtype)
    # A number in the middle between two codes can go either way, and the following columns of its row with it.
    assert (found.values.numpy() == codes).mean() > 0.98
    mine, other = (
        ((w - weight.double().numpy()) @ x.double().numpy().T) for w in (found.dequantize().numpy(), rounded)
    )
    assert np.linalg.norm(mine) == pytest.approx(np.linalg.norm(other), rel=0.01)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_outputs_change_less_than_by_rounding(group: int) -> None:
    weight, x, hessian = case(48, 256)
    exact = x @ weight.t()
    found = x @ gptq(weight, hessian, 4, group, torch.bfloat16).dequantize().t() - exact
    plain = x @ nearest(weight, 4, group, torch.bfloat16).t() - exact
    assert found.norm() < 0.8 * plain.norm()


def test_eight_bits_lose_a_sixteenth_of_what_four_do() -> None:
    weight, x, hessian = case(16, 128)
    errors = [
        (x @ (gptq(weight, hessian, bits, 32, torch.float32).dequantize() - weight).t()).norm() for bits in (4, 8)
    ]
    assert errors[1] < errors[0] / 10


def test_inputs_that_are_always_zero_and_weights_of_zero() -> None:
    weight, x, _ = case(8, 64)
    x[:, 5] = 0
    weight[3] = 0
    hessian = Hessian(64)
    hessian.add(x)
    found = gptq(weight, hessian, 4, 32, torch.bfloat16).dequantize()
    assert found.isfinite().all() and not found[3].any()
    assert (found[:, 5] - weight[:, 5]).abs().max() < weight.abs().max() / 10  # rounded, with nothing to make up for


def test_what_is_no_number_is_named() -> None:
    weight, _, hessian = case(4, 32)
    bad = weight.clone()
    bad[1, 1] = torch.nan
    with pytest.raises(Undefined, match="its weights are infinite or not numbers"):
        gptq(bad, hessian, 4, 32, torch.float32)
    hessian.add(torch.full((1, 32), torch.inf))
    with pytest.raises(Undefined, match="its inputs are infinite or not numbers"):
        gptq(weight, hessian, 4, 32, torch.float32)


@given(data=st.data(), bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 64, 128]))
def test_stored_codes_come_back_bit_for_bit(data: st.DataObject, bits: int, group: int) -> None:
    rows, groups = data.draw(st.integers(1, 19)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    values, zeros = (
        torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
        for shape in ((rows, groups * group), (rows, groups))
    )
    scales = torch.rand(rows, groups, generator=generator).add(0.01).to(dtype)
    codes = Codes(values, scales, zeros, bits)
    tensors = {name.removeprefix("layer."): each for name, each in tensors_of("layer", codes).items()}
    assert np.array_equal(decoded(tensors, bits, group), codes.dequantize().numpy())
    scheme = quantization_config(Scheme(group, 16, bits), ["lm_head"])
    headers = {name: Header(SAFETENSORS[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    packing = CompressedFormat(scheme).packing("layer", headers)
    assert packing is not None
    assert set(packing.tensors("layer", (rows, groups * group), headers)) == set(tensors)
    read = packing.weight("layer", (rows, groups * group), tensors)
    assert torch.equal(read.codes, values) and torch.equal(read.zeros, zeros)
    assert torch.equal(read.dequantize(), codes.dequantize())
