"""A checkpoint's tensors: each has a place in the model and a known meaning, or the checkpoint is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from mxfp4_checkpoints import QUANTIZATION, pack_experts
from offline import make_core, run, tokens
from safetensors.torch import load_file, save_file

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.checkpoint.quant_method import LOADERS
from inflight.loading.loader import LoadError, load

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7]]


def config(path: str | Path, **options) -> EngineConfig:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", **options}
    return EngineConfig.from_dict({"model": str(path), **options})


def greedy_tokens(path: str | Path, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    deltas = run(make_core(str(path), **options), PROMPTS, [params] * 2)
    return [tokens(deltas[index, 0]) for index in range(2)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("weights"))


def changed(source: str, folder: Path, weights=None, **values) -> Path:
    """A copy of a checkpoint with other entries in config.json, and `weights` applied to its tensors."""
    shutil.copytree(source, folder)
    config_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_json | values))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"quant_method='modelopt', which is unknown here"),
        *(
            ({"quant_method": method}, rf"quant_method='{method}', which transformers serves with kernels of other")
            for method in ("aqlm", "eetq", "higgs", "hqq", "quanto", "spqr", "torchao", "vptq")
        ),
        ({"quant_method": "quip"}, r"quant_method='quip', which is unknown here"),
        ({"quant_algo": "FP8"}, r"quant_method='unnamed'"),
    ],
)
def test_a_quantization_that_is_not_served_is_refused_by_name(tmp_path, llama, quantization, why):
    path = changed(llama, tmp_path / "quantized", quantization_config=quantization)
    with pytest.raises(LoadError, match=why) as caught:
        load(config(path))
    assert "mxfp4" in str(caught.value) and "unquantized checkpoint" in str(caught.value)
    load(config(path, load_format="dummy"))


def test_a_loader_in_the_table_serves_its_method(tmp_path, llama, monkeypatch):
    path = changed(llama, tmp_path / "quantized", quantization_config={"quant_method": "homemade"})
    asked = []
    dummy = load(config(llama, load_format="dummy")).model

    def loader(*args):
        asked.append(args)
        from inflight.loading.checkpoint.weights import dummy_weights

        return dummy_weights(*args)

    monkeypatch.setitem(LOADERS, "homemade", loader)
    assert type(load(config(path)).model) is type(dummy)
    assert [argument.quantization_config["quant_method"] for _, argument, _, _ in asked] == ["homemade"]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight_scale", "v_head.weight", "model.layers.2.new"])
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path, llama, name):
    path = changed(llama, tmp_path / "more", lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(LoadError, match=rf"no place for 1 of its tensors, such as {name}"):
        load(config(path))


def test_a_bias_is_not_taken_for_an_old_causal_mask(tmp_path, llama):
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
    old = {"model.layers.0.attn.bias": mask, "model.layers.0.attn.masked_bias": torch.tensor(-1e4)}
    load(config(changed(llama, tmp_path / "old", lambda tensors: tensors.update(old))))
    new = {"model.layers.0.attn.bias": torch.ones(32)}
    with pytest.raises(LoadError, match=r"such as model\.layers\.0\.attn\.bias"):
        load(config(changed(llama, tmp_path / "new", lambda tensors: tensors.update(new))))


def test_scales_of_a_kv_cache_change_no_weights(tmp_path, llama):
    scales = {f"model.layers.{layer}.self_attn.{name}_scale": torch.ones(1) for layer in range(2) for name in "kv"}
    load(config(changed(llama, tmp_path / "scales", lambda tensors: tensors.update(scales))))


def test_eight_bit_codes_without_a_quantization_are_refused(tmp_path, llama):
    name = "model.layers.1.mlp.down_proj.weight"

    def to_fp8(tensors):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(
        LoadError, match=rf"1 of its tensors are codes of some quantization, such as {name} \(F8_E4M3\)"
    ):
        load(config(changed(llama, tmp_path / "codes", to_fp8)))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_in_pickles_format_loads(tmp_path, llama, sharded):
    path = tmp_path / "pickled"
    shutil.copytree(llama, path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    if sharded:
        names = sorted(tensors)
        parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for part, inside in parts.items():
            torch.save({name: tensors[name] for name in inside}, path / part)
        weight_map = {name: part for part, inside in parts.items() for name in inside}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(tensors, path / "pytorch_model.bin")
    assert greedy_tokens(path) == greedy_reference(llama, PROMPTS, [8, 8])


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_would_run_code_is_refused(tmp_path, llama, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pickled"
    shutil.copytree(llama, path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Malicious()}, path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin is damaged, or contains more than tensors"):
        load(config(path))
    assert not Path("ran").exists()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(LoadError, match="more than tensors"):
        load(config(path))
    assert not Path("ran").exists()


def test_four_bit_floats_are_unpacked(tmp_path):
    """mxfp4 experts give the tokens of a checkpoint that stores the same numbers plainly."""
    plain = make_checkpoint("gpt_oss", tmp_path, hidden_size=32, intermediate_size=32, max_position_embeddings=64)
    numbers = changed(plain, tmp_path / "numbers", lambda tensors: tensors.update(pack_experts(dict(tensors))))
    coded = changed(plain, tmp_path / "coded", pack_experts, quantization_config=QUANTIZATION)
    assert greedy_tokens(coded) == greedy_reference(str(numbers), PROMPTS, [8, 8])


def test_only_the_files_that_are_loaded_count(tmp_path, llama):
    """Some repositories hold their weights twice, in the layout of another library as well."""
    path = changed(llama, tmp_path / "twice")
    (path / "consolidated.safetensors").write_bytes(b"not read")
    load(config(path))
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json is damaged; download it again"):
        load(config(path))
