"""The profile of a step is a Chrome trace that names the functions of the engine and the layers of the model."""

from __future__ import annotations

import re

from profile_step import main, slices

TINY = ["--sequences", "2", "--prompt-tokens", "5", "--steps", "3", "--set", "cpu_threads=1"]


def test_the_profile_names_engine_functions_and_model_layers(tmp_path, capsys):
    path = tmp_path / "profile.json.gz"
    main([*TINY, "--set", "native_forward=false", "--output", str(path)])
    assert f"wrote {path}: 3 steps" in capsys.readouterr().out
    found = slices(path)
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in found)

    def count(pattern: str) -> int:
        return sum(re.search(pattern, event["name"]) is not None for event in found)

    assert count(r"engine/core\.py\(\d+\): step$") == 3
    assert count(r"engine/scheduler\.py\(\d+\): schedule$") >= 3
    assert count(r"^nn\.Module: LlamaDecoderLayer_\d") == 3 * 4, "three steps of a model with four layers"
    assert count(r"^aten::embedding$") == 3


def test_by_default_the_forward_pass_is_one_native_call(tmp_path):
    main([*TINY, "--output", str(tmp_path / "profile.json")])
    names = [event["name"] for event in slices(tmp_path / "profile.json")]
    assert sum(re.search(r"kernels/cpu/cpu_decoder\.py\(\d+\): forward$", name) is not None for name in names) == 3
    assert not any("nn.Module: LlamaDecoderLayer" in name for name in names)
