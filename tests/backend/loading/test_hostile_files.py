"""Safetensors files and configurations that lie about sizes, and numbers that no weight has: each ends in one line.

Nothing as large as they say is made.  tests/backend/gguf/test_header.py has GGUF files, test_stored_formats.py the
tensors of codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integer_checkpoints import write
from safetensors.torch import load_file, save_file

from inflight.config import EngineConfig
from inflight.loading.checkpoint import plausible, weights
from inflight.loading.checkpoint.checkpoint_config import read_config
from inflight.loading.checkpoint.gguf_format import checked_blocks
from inflight.loading.checkpoint.weights import check_weights_fit
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization.block_weight import BLOCK_KINDS

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, Any]], object]


def config(path: str, **options: Any) -> EngineConfig:
    values = dict(model=path, device="cpu", dtype="bfloat16", kv_cache_memory="1MiB", max_model_len=64)
    return EngineConfig.from_dict({**values, **options})


def check(path: str, **options: Any) -> None:
    """As a load does before it reads or makes a weight."""
    made = config(path, **options)
    check_weights_fit(made, read_config(made), torch.bfloat16, CPU)


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("codes")
    path = make_checkpoint("llama", folder, intermediate_size=64, num_hidden_layers=1)
    write(path, "pack-quantized group")
    return path


def copied(path: str, folder: Path, content: bytes | None = None, **values: Any) -> str:
    """The checkpoint with other bytes in its file, and other entries in config.json."""
    source = Path(path)
    config_json = json.loads((source / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "model.safetensors").write_bytes(
        (source / "model.safetensors").read_bytes() if content is None else content
    )
    return str(folder)


def with_header(content: bytes, change: Change) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content[8 + size :]


def overlap(header: dict[str, Any]) -> None:
    first, second = (header[f"model.layers.0.mlp.{name}_proj.weight_packed"] for name in ("gate", "up"))
    second["data_offsets"] = first["data_offsets"]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: raw[:-100],
        lambda raw: raw[:4],
        lambda raw: (2**63).to_bytes(8, "little") + raw[8:],
        lambda raw: (2**64 - 1).to_bytes(8, "little") + raw[8:],
        lambda raw: (90 << 20).to_bytes(8, "little") + raw[8:],
        lambda raw: raw[:8] + b"[" + raw[9:],
        lambda raw: with_header(raw, overlap),
        lambda raw: with_header(raw, lambda h: h[f"{UP}.weight_packed"].update(shape=[2**40, 2**40])),
        lambda raw: with_header(raw, lambda h: h[f"{UP}.weight_packed"].update(shape=[2**32, 2**32])),
        lambda raw: with_header(raw, lambda h: h[f"{UP}.weight_packed"].update(data_offsets=[2**63, 2**63 + 8])),
        lambda raw: with_header(raw, lambda h: h[f"{UP}.weight_packed"].update(data_offsets=[8, 0])),
        lambda raw: with_header(raw, lambda h: h[f"{UP}.weight_packed"].update(dtype="I3")),
    ],
    ids=[
        *("empty", "truncated", "without a length", "length of 2**63", "length of 2**64", "length of 90 MiB"),
        *("no object", "overlapping tensors", "a shape of 2**80", "a shape of 2**64 numbers"),
        *("offsets of 2**63", "offsets backwards", "unknown dtype"),
    ],
)
def test_a_damaged_header_is_named_with_its_file(codes: str, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    content = change((Path(codes) / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or incomplete \(.+\); download it") as caught:
        check(copied(codes, tmp_path, content))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
)
def test_any_damage_of_a_header_ends_in_one_line(
    codes: str, tmp_path: Path, length: float, changes: list[tuple[float, bytes]]
) -> None:
    """Or is not noticed, where it renames a tensor or changes what is not read."""
    content = bytearray((Path(codes) / "model.safetensors").read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    for place, change in changes:
        at = int(place * size)
        content[at : at + len(change)] = change
    try:
        check(copied(codes, tmp_path, bytes(content if length > 0.3 else content[: int(3 * length * len(content))])))
    except LoadError as error:
        assert "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**7}, r"says num_hidden_layers=10000000, and its files have \d+ tensors; download"),
        ({"intermediate_size": 2**26}, r"(gate|up|down)_proj\.weight has shape \[.*\], not \[.*67108864.*\]"),
        ({"vocab_size": 2**26}, r"embed_tokens\.weight has shape \[199, 32\], not \[67108864, 32\]"),
        ({"head_dim": 2**24}, r"q_proj\.weight has shape \[32, 32\], not \[67108864, 32\]"),
    ],
)
def test_sizes_that_the_files_contradict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, int], message: str
) -> None:
    """transformers makes weights of the sizes in config.json before it compares them: 4 GiB each, for these."""
    path = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(weights, "available_memory", lambda device: 2**50)
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(LoadError, match=rf"\(llama\) cannot be loaded: .*{message}") as caught:
        check(copied(path, folder, **values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_moe", {"num_local_experts": 2**22}, r"says num_experts=4194304, .* have \d+ numbers; download"),
        ("qwen3_moe", {"moe_intermediate_size": 2**22}, r"experts\.\w+ has shape \[.*\]: its files have \d+ numbers"),
        ("qwen3_moe", {"num_key_value_heads": 2**22}, r"[kv]_proj\.weight has shape \[.*\], not \[.*\]"),
        ("gpt2", {"n_positions": 2**26}, r"wpe\.weight has shape \[\d+, 32\], not \[67108864, 32\]"),
        ("gpt2", {"n_inner": 2**26}, r"c_(fc|proj)\.weight has shape \[.*\], not \[.*67108864.*\]"),
        ("gpt2", {"vocab_size": 2**26}, r"wte\.weight has shape \[\d+, 32\], not \[67108864, 32\]"),
    ],
)
@pytest.mark.parametrize("has_prefix", [True, False])
def test_sizes_of_other_names_that_the_files_contradict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, values: dict[str, int], message: str, has_prefix: bool
) -> None:
    """Whether experts are stored one by one or together, and names with the prefix of the base model or without."""
    path = Path(make_checkpoint(family, tmp_path))
    if not has_prefix:
        tensors = load_file(path / "model.safetensors")
        bare = {name.removeprefix("transformer.").removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(weights, "available_memory", lambda device: 2**50)
    check(str(path))
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(LoadError, match=rf"\({family}\) cannot be loaded: .*{message}"):
        check(copied(str(path), folder, **values))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "gemma2"])
def test_a_sound_checkpoint_is_not_refused_however_suspicious(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Numbers that are no sizes of weights can be any: here all models are made, without memory, and compared."""
    monkeypatch.setattr(plausible, "_estimate", lambda text_config: 2**80)
    check(make_checkpoint(family, tmp_path))


def test_sizes_are_compared_only_if_all_files_are_here(tmp_path: Path) -> None:
    """A file of a few tensors says nothing about a model whose other files are still on the hub."""
    path = Path(make_checkpoint("llama", tmp_path))
    names = list(load_file(path / "model.safetensors"))
    first = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if name == names[0]}
    (path / "model.safetensors").unlink()
    save_file(first, path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    files = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check(str(path))


@pytest.mark.parametrize("value", [2.0**101, -(2.0**127)])
def test_scales_of_a_size_that_no_weight_has(codes: str, tmp_path: Path, value: float) -> None:
    """They are finite, and their products are not."""
    tensors = load_file(Path(codes) / "model.safetensors")
    scales = tensors[f"{UP}.weight_scale"].float()
    scales[3, 0] = value
    path = copied(codes, tmp_path)
    save_file({**tensors, f"{UP}.weight_scale": scales}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=rf"{UP}\.weight_scale has a scale of [\d.e+]+, which weights cannot"):
        load(config(path))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_are_no_numbers_are_named_by_int4(tmp_path: Path, value: float) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight"][3, 5] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=rf"{UP}\.weight has infinite or undefined numbers; download"):
        load(config(path, quantization="int4"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(kind for kind in BLOCK_KINDS if BLOCK_KINDS[kind].read is not None)), st.data())
def test_any_bytes_of_blocks_are_finite_numbers_or_refused(kind: str, data: st.DataObject) -> None:
    """Scales of all sizes and signs: float16 has none whose products with codes overflow."""
    layout = BLOCK_KINDS[kind]
    size = 2, 256 // layout.numbers * layout.num_bytes
    blocks = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 0x7B, size, dtype=np.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        row, at = data.draw(st.integers(0, 1)), data.draw(st.integers(0, blocks.shape[1] - 2))
        half = data.draw(st.sampled_from([0, -0.0, 65504, -65504, 6e-8, np.nan, np.inf, -np.inf]))
        blocks[row, at : at + 2] = np.array([half], np.float16).view(np.uint8)
    try:
        found = checked_blocks("blk.0.x", layout, torch.from_numpy(blocks))
    except LoadError as error:
        assert "blk.0.x" in str(error) and "\n" not in str(error)
    else:
        assert bool(found.dequantize().isfinite().all())
