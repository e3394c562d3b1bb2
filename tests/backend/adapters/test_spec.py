"""Adapters' files: what is served, and one line for all else, however hostile."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inflight.adapters import peft_config
from inflight.adapters.spec import CONFIG, WEIGHTS, AdapterError, describe_adapter, read_adapter

CONFIG_OF = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "lora_dropout": 0.1,
    "peft_version": "0.18.0",
}
Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"


def matrices(*modules: str, rank: int = 4) -> dict[str, Any]:
    found = {}
    for module in modules:
        found[f"base_model.model.{module}.lora_A.weight"] = np.full((rank, 8), 0.5, dtype=np.float32)
        found[f"base_model.model.{module}.lora_B.weight"] = np.full((6, rank), 0.25, dtype=np.float16)
    return found


ALL = (Q.format(0), DOWN.format(0), Q.format(1), DOWN.format(1))


def written(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(matrices(*ALL) if tensors is None else tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**CONFIG_OF, **config}))
    return folder


def refused(folder: Path, max_lora_rank: int = 16) -> str:
    with pytest.raises(AdapterError) as error:
        describe_adapter(folder, "mine", max_lora_rank)
    message = str(error.value)
    assert message.startswith("adapter 'mine': ") and "\n" not in message and len(message) < 700
    return message


def test_the_id_is_of_the_content(tmp_path: Path) -> None:
    first = describe_adapter(written(tmp_path / "a"), "mine", 16)
    assert (first.name, first.path, first.rank, len(first.id)) == ("mine", str(tmp_path / "a"), 4, 32)
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "a", copied)
    (copied / CONFIG).write_text(json.dumps(dict(reversed(CONFIG_OF.items())), indent=3))
    (copied / "README.md").write_text("another file")
    assert describe_adapter(copied, "other", 16).id == first.id, "neither name, path nor spaces are content"
    assert describe_adapter(written(tmp_path / "b", lora_alpha=9), "mine", 16).id != first.id
    data = bytearray((copied / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copied / WEIGHTS).write_bytes(data)
    assert describe_adapter(copied, "mine", 16).id != first.id
    content = read_adapter(first, 16)
    assert sorted(content.pairs) == sorted(ALL) and set(content.scales.values()) == {2.0}
    a = content.pairs[ALL[0]].a
    assert np.frombuffer(content.data[a.start : a.stop], np.float32).tolist() == [0.5] * 32
    shutil.copy(copied / WEIGHTS, tmp_path / "a" / WEIGHTS)
    with pytest.raises(AdapterError, match="'mine': its files have changed"):
        read_adapter(first, 16)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, [2, 2, 2, 2]),
        ({"use_rslora": True}, [4, 4, 4, 4]),
        ({"init_lora_weights": True}, [2, 2, 2, 2]),
        ({"init_lora_weights": "Gaussian"}, [2, 2, 2, 2]),
        ({"alpha_pattern": {"q_proj": 2}}, [0.5, 2, 0.5, 2]),
        ({"alpha_pattern": {r"layers\.1\..*": 4, "q_proj": 2}}, [0.5, 2, 1, 1]),
        ({"alpha_pattern": {"^model.layers.0.mlp.down_proj": 12}}, [2, 3, 2, 2]),
        ({"alpha_pattern": {"proj": 12}}, [2, 2, 2, 2]),  # ends of a path begin at a dot
        ({"rank_pattern": {"q_proj": 4}, "r": 8}, None),
        ({"target_modules": r".*\.(q|down)_proj"}, [2, 2, 2, 2]),
        ({"target_modules": r".*\.q_proj"}, None),
        ({"target_modules": r".{1,90}(q|down)_proj"}, [2, 2, 2, 2]),
        ({"target_modules": "all-linear"}, [2, 2, 2, 2]),
        ({"target_modules": ["proj"]}, None),
        ({"target_modules": [*ALL]}, [2, 2, 2, 2]),
        ({"exclude_modules": ["down_proj"]}, None),
        ({"exclude_modules": "lm_head"}, [2, 2, 2, 2]),
        ({"layers_to_transform": [0, 1]}, [2, 2, 2, 2]),
        ({"layers_to_transform": 1}, None),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, [2, 2, 2, 2]),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h", "blocks"]}, None),
    ],
)
def test_which_layers_with_which_scale(tmp_path: Path, config: dict[str, Any], scales: list[float] | None) -> None:
    folder = written(tmp_path / "a", **config)
    if scales is None:
        assert "the files are of different adapters" in refused(folder)
    else:
        assert [read_adapter(describe_adapter(folder, "x", 16), 16).scales[module] for module in ALL] == scales


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not served: must be 'LORA'"),
        ({"use_dora": True}, "use_dora=True: DoRA is not served"),
        ({"use_something_new": True}, "use_something_new=True: it is not served"),
        ({"bias": "lora_only"}, "bias='lora_only' is not served"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=['embed_tokens']"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head'"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapters of experts are not served"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices=[5]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': the checkpoint's own weights were changed"),
        ({"init_lora_weights": "pissa_niter_16"}, "save it with PEFT's path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "or merge it into the changed checkpoint"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"r": 0}, "the rank of 'r' is 0"),
        ({"r": 17}, "has rank 4, and adapter_config.json says 17"),
        ({"r": "4"}, "adapter_config.json is not PEFT's"),
        ({"lora_alpha": 1e300}, "the alpha of 'lora_alpha' is 1e+300"),
        ({"rank_pattern": {"(": 4}}, "is no regular expression"),
        ({"rank_pattern": dict.fromkeys(map(str, range(1001)), 4)}, "rank_pattern has 1001 patterns: at most 1000"),
        ({"layers_pattern": ["h"] * 1001}, "layers_pattern has 1001 patterns: at most 1000; join some with |"),
        ({"target_modules": "x" * 5000}, "a pattern of its modules has 5000 characters: at most 4096"),
    ],
)
def test_configurations_that_are_not_served(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in refused(written(tmp_path / "a", **config))


def test_matching_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`regex` is quick even with patterns that take `re` for ever, so the test waits in its place."""

    class Slow:
        def match(self, text: str, timeout: float, concurrent: bool) -> None:
            assert 0 < timeout <= peft_config._MATCH_SECONDS and concurrent
            raise TimeoutError

    monkeypatch.setattr(peft_config.regex, "compile", lambda pattern: Slow())
    folder = written(tmp_path / "a", rank_pattern={"(a|a)*b": 4})
    assert "takes more than 5 s to match; simplify it" in refused(folder)


def test_no_match_begins_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 3 of the 5 s."""
    now, begun = [0.0], []

    class Slow:
        def match(self, text: str, timeout: float, concurrent: bool) -> None:
            begun.append(timeout)
            now[0] += 3

    monkeypatch.setattr(peft_config.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(peft_config.regex, "compile", lambda pattern: Slow())
    folder = written(tmp_path / "a", rank_pattern={f"q_proj{i}": 4 for i in range(100)})
    assert "takes more than 5 s to match; simplify it" in refused(folder)
    assert begun == [5, 2]


def test_names_in_a_list_are_not_compared_one_by_one() -> None:
    class Name(str):
        num_compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.num_compared += 1
            return str.__eq__(self, other)

    names: list[str] = [Name(f"layers.{i}.q_proj") for i in range(2000)]
    config = peft_config.PeftConfig("LORA", target_modules=names, layers_to_transform=[0, 1999])
    modules = ["model.layers.0.q_proj", "layers.1999.q_proj", "." * 10_000 + "layers.0.q_proj"]
    assert list(config.matching(modules[:2])) == modules[:2] and Name.num_compared < 20
    with pytest.raises(AdapterError, match="leave out"):
        config.matching([modules[2] + "."])


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "a{4000000000}", "(a{9}){9}", "a{1, 101}"])
def test_counts_that_take_long_to_compile(tmp_path: Path, pattern: str) -> None:
    said = refused(written(tmp_path / "a", target_modules=pattern))
    assert "one of at most 100 is allowed; write it without counts" in said


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (matrices(Q.format(0), rank=3), "has rank 3, and adapter_config.json says 4"),
        ({}, "has 0 tensors"),
        ({k: v for k, v in matrices(ALL[0]).items() if "lora_A" in k}, "has lora_A but no lora_B"),
        ({k.replace("lora_A", "lora_embedding_A"): v for k, v in matrices(ALL[0]).items()}, "adapts an embedding"),
        ({**matrices(ALL[0]), f"base_model.model.{ALL[0]}.lora_magnitude_vector": np.ones(6)}, "belongs to DoRA"),
        ({**matrices(ALL[0]), "base_model.model.model.norm.bias": np.ones(6)}, "is a bias"),
        ({**matrices(ALL[0]), "base_model.model.lm_head.weight": np.ones((6, 6))}, "is no tensor of a LoRA adapter"),
        ({"q_proj.lora_A.weight": np.ones((4, 8))}, "is no tensor of a LoRA adapter"),
        ({k: v.astype(np.int8) for k, v in matrices(ALL[0]).items()}, "has dtype 'I8': must be one of F32, F16, BF16"),
        ({k: v[..., None] for k, v in matrices(ALL[0]).items()}, "must be a matrix"),
        ({k: v[:, :2] if "lora_B" in k else v for k, v in matrices(ALL[0]).items()}, "of shapes [4, 8] and [6, 2]"),
    ],
)
def test_tensors_that_are_not_served(tmp_path: Path, tensors: dict[str, Any], said: str) -> None:
    arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    assert said in refused(written(tmp_path / "a", arrays))


def test_a_rank_above_the_limit(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    assert "has rank 4: at most max_lora_rank=3; raise that key in model.json" in refused(folder, 3)
    assert describe_adapter(folder, "x", 4).rank == 4


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    weights = (folder / WEIGHTS).read_bytes()
    header = struct.unpack("<Q", weights[:8])[0]
    for data in (
        b"",
        weights[:5],
        weights[:100],
        weights[:-1],
        weights + b"\0",
        struct.pack("<Q", 2**63) + weights[8:],
        struct.pack("<Q", header) + b"[" * header + weights[8 + header :],
        struct.pack("<Q", header) + b"\xff" * header + weights[8 + header :],
        weights.replace(b"[4,8]", b"[8,8]", 1),
        weights.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1),
    ):
        (folder / WEIGHTS).write_bytes(data)
        refused(folder)
    (folder / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}" in refused(folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    assert "adapter_model.bin is a pickle, which can run code" in refused(folder)
    os.mkfifo(folder / WEIGHTS)
    assert "is no file" in refused(folder)
    (folder / WEIGHTS).unlink()
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(2**34 + 1)
    assert "at most 17179869184; it is no adapter" in refused(folder)
    for text in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"peft_type": 3}', b'{"peft_type": "LORA", "r": 1e999}'):
        (folder / CONFIG).write_bytes(text)
        assert "adapter_config.json is not PEFT's" in refused(folder)
    (folder / CONFIG).unlink()
    assert f"has no {CONFIG}: give a folder that PEFT's save_pretrained has written" in refused(folder)
    assert f"has no {CONFIG}" in refused(tmp_path / "nowhere")
    assert "is no path" in refused(Path("a\0b"))
    (folder / CONFIG).mkdir()
    assert "is no file" in refused(folder) or "cannot be read" in refused(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_byte_is_refused_or_another_adapter(tmp_path: Path, data: st.DataObject) -> None:
    folder = written(tmp_path / "fuzz")
    known = describe_adapter(folder, "x", 16).id
    name = data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    content = bytearray((folder / name).read_bytes())
    end = len(content) if name == CONFIG else 8 + struct.unpack("<Q", content[:8])[0]
    at = data.draw(st.integers(0, end - 1))
    content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(min_size=1, max_size=4))
    (folder / name).write_bytes(content)
    try:
        found = describe_adapter(folder, "x", 16)
    except AdapterError as error:
        assert "\n" not in str(error)
    else:
        assert len(found.id) == 32
        if found.id == known:  # spaces
            assert name == CONFIG and json.loads(content) == CONFIG_OF
