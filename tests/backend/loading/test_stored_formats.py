"""Weights in integers, read from tensors as others write them: the same codes, and a message for what is damaged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_checkpoints import CONFIGS, Arrays, Integers, awq, codebook, compressed, gptq, rows

from inflight.loading.checkpoint.auto_round_format import AutoRoundFormat
from inflight.loading.checkpoint.awq_format import AwqFormat, AwqPacking
from inflight.loading.checkpoint.bitsandbytes_format import BitsAndBytesFormat
from inflight.loading.checkpoint.compressed_format import CompressedFormat, CompressedPacking, has_integers
from inflight.loading.checkpoint.gptq_format import GptqFormat, GptqPacking
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.packing import Header, Packing
from inflight.loading.quantization.stored_weight import Coded, StoredWeight

DTYPES = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8", "float16": "F16", "float32": "F32"}
NAME = "model.layers.0.mlp.down_proj"
SETTINGS = settings(max_examples=40, deadline=None)


def headers(arrays: Arrays) -> dict[str, Header]:
    return {name: Header(DTYPES[str(array.dtype)], array.shape) for name, array in arrays.items()}


def read(packing: Packing, arrays: Arrays, size: tuple[int, int]) -> Coded:
    """As the loader does: headers first, and then the tensors that were asked for."""
    asked = packing.tensors(NAME, size, headers(arrays))
    return packing.weight(NAME, size, {name: torch.from_numpy(np.array(arrays[name])) for name in asked})


def expect_same(found: Coded, layer: Integers) -> None:
    """Every code, zero point and scale, and the weight, bit for bit."""
    assert isinstance(found, StoredWeight)
    order = torch.arange(layer.codes.shape[1]) if found.order is None else found.order
    assert torch.equal(found.codes, torch.from_numpy(layer.codes)[:, order])
    assert torch.equal(torch.from_numpy(layer.groups)[order].long(), torch.arange(len(order)) // found.group)
    assert found.bits == layer.bits and found.codes.is_contiguous() and found.codes.dtype == torch.uint8
    assert torch.equal(found.zeros, torch.from_numpy(layer.zeros)) and found.zeros.dtype == torch.uint8
    assert torch.equal(found.scales, torch.from_numpy(layer.scales.astype(np.float32)))
    assert torch.equal(found.dequantize(), torch.from_numpy(layer.weight))
    middle = len(layer.codes) // 2
    assert torch.equal(found.dequantize(middle), torch.from_numpy(layer.weight)[middle:])
    assert torch.equal(found.dequantize(0, middle), torch.from_numpy(layer.weight)[:middle])


@st.composite
def layers(draw: Any, bits: int | None = None, outputs: int = 1, with_order: bool = True) -> Integers:
    """Any codes, zero points (0 and the largest among them) and scales, also negative ones and zeros."""
    bits = bits or draw(st.sampled_from([4, 8]))
    num_outputs = outputs * draw(st.integers(1, 11))
    group, num_groups = draw(st.integers(1, 19)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = num_outputs, group * num_groups
    zeros = rng.choice([0, 1, 2 ** (bits - 1), 2**bits - 1], (num_outputs, num_groups)).astype(np.uint8)
    scales = rng.normal(size=(num_outputs, num_groups)).astype(draw(st.sampled_from([np.float16, np.float32])))
    scales[rng.random(scales.shape) < 0.1] = 0
    scales[0, 0] = 0.5
    groups = np.arange(size[1], dtype=np.int32) // group
    if with_order and draw(st.booleans()):
        groups = rng.permutation(groups)
    return Integers(bits, rng.integers(0, 2**bits, size).astype(np.uint8), zeros, scales, groups)


def group_of(layer: Integers) -> int:
    return len(layer.groups) // layer.scales.shape[1]


@SETTINGS
@given(layers(), st.sampled_from([1, 2]))
def test_gptq(layer: Integers, version: int) -> None:
    packing = GptqPacking(layer.bits, group_of(layer), symmetric=False, first_zero=2 - version)
    expect_same(read(packing, gptq(layer, version), layer.codes.shape), layer)


@SETTINGS
@given(layers(bits=4, outputs=8, with_order=False))
def test_awq(layer: Integers) -> None:
    expect_same(read(AwqPacking(group_of(layer)), awq(layer), layer.codes.shape), layer)


@SETTINGS
@given(layers(), st.booleans())
def test_compressed_groups(layer: Integers, packed: bool) -> None:
    packing = CompressedPacking(layer.bits, "group", group_of(layer), symmetric=False, packed=packed)
    arrays = compressed(layer, packed, False, "group", with_order=True)
    expect_same(read(packing, arrays, layer.codes.shape), layer)


@SETTINGS
@given(layers(with_order=False), st.booleans(), st.booleans(), st.sampled_from(["channel", "tensor"]))
def test_compressed_channels_and_tensors(layer: Integers, packed: bool, symmetric: bool, strategy: str) -> None:
    layer.zeros, layer.scales = layer.zeros[:, :1], layer.scales[:, :1]
    if symmetric:
        layer.zeros = np.full_like(layer.zeros, 2**layer.bits // 2)
    layer.groups = np.zeros_like(layer.groups)
    if strategy == "tensor":
        layer.zeros, layer.scales = (np.repeat(x[:1], len(x), 0) for x in (layer.zeros, layer.scales))
    packing = CompressedPacking(layer.bits, strategy, -1, symmetric, packed)
    expect_same(read(packing, compressed(layer, packed, symmetric, strategy), layer.codes.shape), layer)


@SETTINGS
@given(
    st.integers(1, 9),
    st.sampled_from([1, 7, 16, 32, 40]),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([None, 3, 256]),
    st.integers(0),
)
def test_nf4(num_outputs: int, num_inputs: int, block: int, nested: int | None, seed: int) -> None:
    """Blocks that cross outputs, an odd number of weights, and parts that begin within a byte."""
    weight = np.random.default_rng(seed).normal(size=(num_outputs, num_inputs)).astype(np.float32)
    arrays, expected = codebook(weight, block, nested)
    packing = BitsAndBytesFormat().packing(NAME, headers(arrays))
    assert packing is not None
    found = read(packing, arrays, weight.shape)
    whole = torch.from_numpy(expected)
    assert torch.equal(found.dequantize(), whole)
    for row in range(num_outputs):
        assert torch.equal(found.dequantize(row, row + 1), whole[row : row + 1])


def test_fp4_differs_in_its_table() -> None:
    arrays, expected = codebook(np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32), 64)
    arrays["weight.quant_state.bitsandbytes__fp4"] = arrays.pop("weight.quant_state.bitsandbytes__nf4")
    arrays["weight.quant_map"] = arrays["weight.quant_map"] * 2
    packing = BitsAndBytesFormat().packing(NAME, headers(arrays))
    assert packing is not None
    assert torch.equal(read(packing, arrays, (4, 32)).dequantize(), torch.from_numpy(expected) * 2)


def test_llm_int8() -> None:
    weight = np.random.default_rng(0).normal(size=(7, 13)).astype(np.float32)
    arrays, expected = rows(weight)
    packing = BitsAndBytesFormat().packing(NAME, headers(arrays))
    assert packing is not None
    found = read(packing, arrays, weight.shape)
    assert isinstance(found, StoredWeight)
    assert torch.equal(found.dequantize(), torch.from_numpy(expected))
    arrays["weight_format"] = np.array(2, dtype=np.uint8)
    with pytest.raises(LoadError, match=r"down_proj\.weight_format is 2, an order of elements"):
        read(packing, arrays, weight.shape)


def _layer(bits: int = 4, size: tuple[int, int] = (16, 32), group: int = 16) -> Integers:
    rng = np.random.default_rng(1)
    shape = size[0], size[1] // group
    codes = rng.integers(0, 2**bits, size).astype(np.uint8)
    zeros, scales = np.full(shape, 2 ** (bits - 1), dtype=np.uint8), np.ones(shape, dtype=np.float16)
    return Integers(bits, codes, zeros, scales, np.arange(size[1], dtype=np.int32) // group)


def _every_kind() -> dict[str, tuple[Packing, Arrays]]:
    layer = _layer()
    nested, _ = codebook(np.ones((16, 32), dtype=np.float32), 64, 4)
    packing = BitsAndBytesFormat().packing(NAME, headers(nested))
    assert packing is not None
    return {
        "gptq": (GptqPacking(4, 16, True, 1), gptq(layer)),
        "awq": (AwqPacking(16), awq(layer)),
        "packed": (CompressedPacking(4, "group", 16, False, True), compressed(layer, True, False, "group", True)),
        "int8": (CompressedPacking(8, "group", 16, False, False), compressed(_layer(8), False, False, "group")),
        "nf4": (packing, nested),
    }


KINDS = _every_kind()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_damaged_tensors_end_in_one_line(kind: str, data: st.DataObject) -> None:
    """A tensor that is missing, or has another shape, dtype or contents: a message with its name, or a weight."""
    packing, arrays = KINDS[kind]
    arrays = dict(arrays)
    victim = data.draw(st.sampled_from(sorted(arrays)))
    array = np.array(arrays[victim])
    what = data.draw(st.sampled_from(["missing", "shape", "dtype", "bytes"]))
    if what == "missing":
        del arrays[victim]
    elif what == "shape":
        shape = data.draw(st.lists(st.integers(0, 40), max_size=3))
        arrays[victim] = np.zeros(shape, dtype=array.dtype)
    elif what == "dtype":
        arrays[victim] = np.ones(array.shape).astype(data.draw(st.sampled_from(sorted(DTYPES))))
    else:
        raw = np.frombuffer(data.draw(st.binary(min_size=array.nbytes, max_size=array.nbytes)), dtype=array.dtype)
        arrays[victim] = raw.reshape(array.shape)
    try:
        found = read(packing, arrays, (16, 32))
    except LoadError as error:
        assert f"{NAME}." in str(error) and "\n" not in str(error)
    else:
        assert found.shape == (16, 32) and found.dequantize().shape == (16, 32)


SCALES = {"gptq": "scales", "awq": "scales", "packed": "weight_scale", "int8": "weight_scale"}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_scales_that_mean_nothing(kind: str, value: float) -> None:
    packing, arrays = KINDS[kind]
    scales = np.full_like(arrays[SCALES[kind]], value)
    why = "all of its scales are zero" if value == 0 else "has infinite or undefined scales"
    with pytest.raises(LoadError, match=rf"{NAME}\.{SCALES[kind]}:? {why}; download"):
        read(packing, {**arrays, SCALES[kind]: scales}, (16, 32))


@pytest.mark.parametrize("kind, tensor", [("gptq", "g_idx"), ("packed", "weight_g_idx")])
def test_groups_of_inputs_that_cannot_be(kind: str, tensor: str) -> None:
    packing, arrays = KINDS[kind]
    for groups, message in (
        (np.full(32, 2), "names the group 2, and there are 2"),
        (np.repeat([0, 1, -1], [16, 15, 1]), "names the group -1, and there are 2"),
        (np.repeat([0, 1], [17, 15]), "group 0 has 17 inputs, not group_size=16"),
    ):
        with pytest.raises(LoadError, match=f"{tensor}:? {message}; download"):
            read(packing, {**arrays, tensor: groups.astype(np.int32)}, (16, 32))


def test_an_unused_weight_g_idx() -> None:
    packing, arrays = KINDS["packed"]
    found = read(packing, {**arrays, "weight_g_idx": np.full(32, -1, dtype=np.int32)}, (16, 32))
    assert isinstance(found, StoredWeight) and found.order is None


def test_a_weight_shape_of_another_size() -> None:
    packing, arrays = KINDS["packed"]
    arrays = {**arrays, "weight_shape": np.array([2**40, 2**40])}
    with pytest.raises(LoadError, match=r"weight_shape is \[1099511627776, 1099511627776\], and"):
        read(packing, arrays, (16, 32))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shape": [32, 16]}, r"says that the weight has shape \[32, 16\], and its config.json implies \[16, 32\]"),
        ({"blocksize": 0}, r"has blocks of \[0, 4\]"),
        ({"blocksize": 10**30}, "nf4 "),
        ({"nested_blocksize": 10**12}, r"has blocks of \[64, 1000000000000\]"),
        ({"nested_blocksize": None}, r"has blocks of \[64\]"),
        ({"blocksize": "64"}, "is not readable: Expected `int`"),
        ({"blocksize": 32}, r"weight.absmax has 8 numbers, and the weight 16 blocks"),
    ],
)
def test_a_state_that_contradicts_the_tensors(changes: dict[str, Any], message: str) -> None:
    packing, arrays = KINDS["nf4"]
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(arrays[name])) | changes
    with pytest.raises(LoadError, match=message):
        read(packing, {**arrays, name: np.frombuffer(json.dumps(state).encode(), dtype=np.uint8)}, (16, 32))


def test_symmetric_zero_points_are_what_they_must_be() -> None:
    layer = _layer()
    packing = GptqPacking(4, 16, symmetric=True, first_zero=1)
    with pytest.raises(LoadError, match=r'qzeros has zero points other than 8.*checkpoint_format.*"gptq_v2"'):
        read(packing, gptq(layer, version=2), (16, 32))
    layer.zeros[0, 0] = 3
    arrays = compressed(layer, True, False, "group")
    with pytest.raises(LoadError, match="weight_zero_point is not zero"):
        read(CompressedPacking(4, "group", 16, True, True), arrays, (16, 32))


def test_codes_beyond_their_bits() -> None:
    arrays = compressed(_layer(8), False, True, "group")
    with pytest.raises(LoadError, match=r"down_proj\.weight contains -?\d+, which 4 bits cannot"):
        read(CompressedPacking(4, "group", 16, True, False), arrays, (16, 32))


@pytest.mark.parametrize("packing", [GptqPacking(4, 24, True, 1), AwqPacking(24)])
def test_groups_that_do_not_divide_the_inputs(packing: Packing) -> None:
    with pytest.raises(LoadError, match="has 32 inputs, which are not a multiple of group_size=24"):
        packing.tensors(NAME, (16, 32), {})


PACKED = "pack-quantized group"
FORMATS = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "auto-round gptq": AutoRoundFormat,
    PACKED: CompressedFormat,
}


def _group(**changes: Any) -> dict[str, Any]:
    group = CONFIGS[PACKED]["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, **changes}}}


def _weights(**changes: Any) -> dict[str, Any]:
    return _group(weights={**CONFIGS[PACKED]["config_groups"]["group_0"]["weights"], **changes})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *[("gptq", {"bits": bits}, rf"codes of {bits} bits \(supported: 4 and 8\)") for bits in (2, 3, 5, 6, 7, 16)],
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ("gptq", {"checkpoint_format": "bitblas"}, "checkpoint_format='bitblas'"),
    ("gptq", {"format": "exllama"}, "checkpoint_format='exllama'"),
    ("gptq", {"is_marlin_format": True}, "checkpoint_format='marlin'"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype='int16'"),
    ("gptq", {"bits": "four"}, "is not GPTQ's: Expected `int`"),
    ("gptq", {"dynamic": {"(": {}}}, "is not GPTQ's: missing \\)"),
    ("gptq", {"dynamic": ["-:x"]}, "is not GPTQ's"),
    ("awq", {"version": "gemv"}, "version='gemv'"),
    ("awq", {"version": "GEMV_FAST"}, "version='gemv_fast'"),
    ("awq", {"version": "exllama"}, "version='exllama'"),
    ("awq", {"version": None, "backend": "llm-awq"}, "version='llm-awq'"),
    ("awq", {"bits": 8}, "codes of 8 bits"),
    ("auto-round gptq", {"bits": 3}, "codes of 3 bits"),
    ("auto-round gptq", {"packing_format": "auto_round:fp8_static"}, "packing_format='auto_round:fp8_static'"),
    ("auto-round gptq", {"data_type": "mx_fp"}, "data_type='mx_fp'"),
    (PACKED, {"format": "marlin-24"}, "format='marlin-24'"),
    (PACKED, {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    (PACKED, {"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
    (
        "pack-quantized group",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse: format='sparse-24-bitmask'",
    ),
    (PACKED, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (PACKED, _weights(num_bits=3), "codes of 3 bits"),
    (PACKED, _weights(strategy="block"), "strategy='block'"),
    (PACKED, _group(targets=["re:("]), "is not compressed-tensors'"),
    (PACKED, _group(weights=None), "has no weights"),
]


@pytest.mark.parametrize("kind, changes, message", REFUSED, ids=str)
def test_configurations_that_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        FORMATS[kind]({**CONFIGS[kind], **changes})


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.dictionaries(
        st.sampled_from(
            [
                *("bits", "group_size", "sym", "dynamic", "format", "version", "extra_config", "w_bit"),
                *("config_groups", "sparsity_config", "transform_config"),
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
)
def test_any_configuration_is_read_or_refused(kind: str, changes: dict[str, Any]) -> None:
    try:
        has_integers({**CONFIGS[kind], **changes})
        FORMATS[kind]({**CONFIGS[kind], **changes}).packing(NAME, {"qweight": Header("I32", (4, 16))})
    except LoadError as error:
        assert "\n" not in str(error)


def _packing_of(dynamic: dict[str, Any], name: str) -> GptqPacking | None:
    stored_as = GptqFormat({**CONFIGS["gptq"], "dynamic": dynamic})
    return stored_as.packing(name, {"qweight": Header("I32", (4, 16))})


def test_dynamic_rules() -> None:
    """The first that matches, from the beginning of the name."""
    dynamic = {
        "-:.*k_proj": {},
        r"+:model\.layers\.1\.": {"bits": 8, "group_size": 32},
        r".*down_proj": {"sym": False},
        "lm_head": {"bits": 3},
    }
    assert _packing_of(dynamic, "model.layers.1.mlp.down_proj") == GptqPacking(8, 32, True, 1)
    assert _packing_of(dynamic, "model.layers.2.mlp.down_proj") == GptqPacking(4, 16, False, 1)
    assert _packing_of(dynamic, "model.layers.2.mlp.up_proj") == GptqPacking(4, 16, True, 1)
    with pytest.raises(LoadError, match=r"k_proj\.qweight contains codes, and dynamic excludes the layer"):
        _packing_of(dynamic, "model.layers.1.self_attn.k_proj")
    with pytest.raises(LoadError, match="lm_head has codes of 3 bits"):
        _packing_of(dynamic, "lm_head")


def test_auto_rounds_layers() -> None:
    """By name, else by the first pattern that is found in it."""
    extra = {NAME: {"bits": 8}, r".*up_proj": {"group_size": 32, "sym": False}, "lm_head": {"bits": 16}}
    found = {"qweight": Header("I32", (4, 16))}
    stored_as = AutoRoundFormat({**CONFIGS["auto-round gptq"], "extra_config": extra})
    assert stored_as.packing(NAME, found) == GptqPacking(8, 16, True, 1)
    assert stored_as.packing("model.layers.0.mlp.up_proj", found) == GptqPacking(4, 32, False, 1)
    assert stored_as.packing("lm_head", {"weight": Header("F16", (4, 16))}) is None
    awq_format = AutoRoundFormat({**CONFIGS["auto-round awq"], "extra_config": extra})
    with pytest.raises(LoadError, match=r"down_proj has codes of 8 bits \(supported in AWQ: 4\)"):
        awq_format.packing(NAME, found)


def test_targets_of_config_groups() -> None:
    found = {"weight_packed": Header("I32", (4, 16))}
    stored_as = CompressedFormat({**CONFIGS[PACKED], **_group(targets=["re:.*up_proj", NAME])})
    assert stored_as.packing("model.layers.3.mlp.up_proj", found) == stored_as.packing(NAME, found) is not None
    with pytest.raises(LoadError, match="none of its config_groups has it among its targets"):
        stored_as.packing(f"{NAME}s", found)


def test_a_state_that_is_missing() -> None:
    _, arrays = KINDS["nf4"]
    without = {name: header for name, header in headers(arrays).items() if "quant_state" not in name}
    with pytest.raises(LoadError, match=r"weight\.quant_state, which says how it is stored, is in none of its files"):
        BitsAndBytesFormat().packing(NAME, without)
