"""`inflight quantize`: what it writes, what it refuses, and what is left of a run that was stopped."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from integer_checkpoints import write as write_quantized
from nightly import nightly_but
from pack_quantized import dequantized_copy, tensors_in
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from inflight import LLM, SamplingParams
from inflight.frontend.text.tokenizer import Tokenizer
from inflight_tools.cli import app
from inflight_tools.quantize import checkpoint as checkpoint_module
from inflight_tools.quantize import progress, work_folder
from inflight_tools.quantize import run as run_module
from inflight_tools.quantize.progress import Shown
from inflight_tools.quantize.samples import Wanted, samples_of
from inflight_tools.quantize.source import open_source

PROMPTS = [[5, 17, 3, 99], [42, 8], [7, 7, 7, 120, 11, 54]]
MOMENTS = ("within a write", "before a file has its name", "after")
ARCHITECTURES = ("llama", "qwen3", "phi3", "granite", "qwen2")
DEMO = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint"
SHORT = ("--samples", "3", "--sample-tokens", "32")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


@pytest.fixture
def written_samples(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Samples without an engine, where they are not what is tested."""
    generator = torch.Generator().manual_seed(3)
    samples = torch.randint(0, 199, (3, 40), generator=generator).tolist()
    monkeypatch.setattr(run_module, "samples_of", lambda source, wanted: samples)
    return samples


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit status, and both outputs."""
    done = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, (done.stdout + done.stderr).strip()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What it writes


@pytest.mark.parametrize("model_type", nightly_but(("phi3",), ARCHITECTURES))
@pytest.mark.parametrize("head_bits", [16, 4])
def test_the_checkpoint_is_served_as_the_numbers_that_it_contains(
    model_type: str, head_bits: int, tmp_path: Path
) -> None:
    path = make_checkpoint(model_type, tmp_path, intermediate_size=64)
    output = tmp_path / "int4"
    status, text = run(path, "-o", output, *SHORT, "--head-bits", str(head_bits), "--json")
    answer = json.loads(text)
    assert (status, answer["tokens"], answer["not_quantized"]) == (0, 96, [])
    assert answer["bytes"] == (output / "model.safetensors").stat().st_size
    plain = dequantized_copy(output, tmp_path / "plain", head_bits=head_bits)
    # The native forward pass would multiply the codes by inputs in eight bits.
    with LLM(str(output), device="cpu", dtype="float32", native_forward=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert found == greedy_reference(plain, PROMPTS, [12] * 3)
    names = set(answer["relative_errors"])
    assert ("lm_head" in names) == (head_bits == 4)
    assert {name.rpartition(".")[2] for name in names} - {"lm_head"} == (
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        if model_type == "phi3"
        else {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    assert all(0 < error < 0.3 for error in answer["relative_errors"].values())


def test_layers_whose_inputs_do_not_fit_the_group_stay_and_are_named(
    llama: str, tmp_path: Path, written_samples: list[list[int]]
) -> None:
    status, text = run(llama, "-o", tmp_path / "int4")
    named = [f"model.layers.{index}.mlp.down_proj" for index in range(3)]  # of 48 inputs
    assert status == 0 and f"left as they are, since the group does not divide their inputs: {', '.join(named)}" in text
    config = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [*named, "lm_head"]
    before, after = tensors_in(Path(llama)), tensors_in(tmp_path / "int4")
    kept = [name for name in before if "norm" in name or "embed" in name or "lm_head" in name or "down_proj" in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)


def test_a_tied_head_in_codes_has_a_weight_of_its_own(tmp_path: Path, written_samples: list[list[int]]) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    assert run(path, "-o", tmp_path / "tied")[0] == run(path, "-o", tmp_path / "own", "--head-bits", "8")[0] == 0
    tied, own = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("tied", "own"))
    assert (tied["tie_word_embeddings"], own["tie_word_embeddings"]) == (True, False)
    assert not any(name.startswith("lm_head") for name in tensors_in(tmp_path / "tied"))
    assert [group["weights"]["num_bits"] for group in own["quantization_config"]["config_groups"].values()] == [8, 4]
    with LLM(str(tmp_path / "own"), device="cpu", dtype="float32") as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_the_rest_of_the_folder_is_copied_and_large_weights_are_in_several_files(
    llama: str, tmp_path: Path, written_samples: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in Path(llama).iterdir():
        (source / file.name).symlink_to(file)  # as in the cache of the hub
    (source / "tokenizer_config.json").write_text("{}")
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "notes.md").write_text("about the unquantized model")
    assert run(source, "-o", tmp_path / "one")[0] == 0
    monkeypatch.setattr(checkpoint_module, "_LARGEST", 20_000)
    assert run(source, "-o", tmp_path / "several")[0] == 0
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer_config.json", "LICENSE", "model.safetensors"}
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    one, several = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "several")
    assert one.keys() == several.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], several[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())


def test_samples_of_a_text_are_distributed_over_it(tmp_path: Path) -> None:
    source = open_source(str(DEMO))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number}" for number in range(400)), encoding="utf-8")
    everything = samples_of(source, Wanted(1, 2048, 0, text))[0]
    assert samples_of(source, Wanted(100, 64, 0, text)) == [
        everything[start : start + 64] for start in range(0, len(everything), 64)
    ]
    first, middle, last = samples_of(source, Wanted(3, 50, 0, text))
    start = (len(everything) - 50) // 2
    assert [first, middle, last] == [everything[:50], everything[start : start + 50], everything[-50:]]
    text.write_text("too short")
    assert run(DEMO, "-o", tmp_path / "x", "--text", text)[1].endswith("give at least 32, better some thousands")
    text.write_bytes(b"\xff\xfe")
    assert "cannot be read as UTF-8" in run(DEMO, "-o", tmp_path / "x", "--text", text)[1]
    missing = tmp_path / "missing.txt"
    assert run(DEMO, "-o", tmp_path / "y", "--text", missing) == (1, f"inflight: {missing}: No such file or directory")


def test_samples_begin_in_turn_as_documents_and_as_chats_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their engine shows nothing on the terminal, which is the command's."""
    monkeypatch.setenv("INFLIGHT_CACHE", "on purpose")
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    samples = samples_of(open_source(str(DEMO)), Wanted(4, 40, seed=0))
    assert [len(sample) for sample in samples] == [40] * 4 and len(set(map(tuple, samples))) == 4
    tokenizer = Tokenizer.load(str(DEMO))
    assert samples[0][0] == samples[2][0] == 0  # its BOS
    chat = tokenizer.encode("<|endoftext|><|im_start|>user\n", add_special_tokens=False)
    assert samples[1][: len(chat)] == samples[3][: len(chat)] == chat
    assert os.environ["INFLIGHT_CACHE"] == "on purpose"
    assert terminal.getvalue() == ""


def test_samples_depend_on_the_seed_alone(llama: str, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(llama, "-o", tmp_path / name, *SHORT, "--seed", seed)[0] == 0
    a, b, c = (content(tmp_path / name)["model.safetensors"] for name in "abc")
    assert a == b != c


def test_progress_is_one_line_of_a_terminal_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, plain = io.StringIO(), io.StringIO()
    clock = itertools.cycle([5.0, 7.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for file, is_terminal in ((terminal, True), (plain, False)):
        shown = Shown(True, Console(file=file, force_terminal=is_terminal, width=100))
        shown.phase("writing samples")
        shown.layer(0, 28)
        shown.layer(1, 28)
        shown._progress.refresh() if shown._progress is not None else None
        shown.end()
    assert "layer 2 of 28, 2.0 s a layer, 54 s left" in terminal.getvalue() and plain.getvalue() == ""


# What is left of a run that was stopped


def in_a_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process; returns its status, as `os.waitpid` has it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("moment", nightly_but(("within a write",), MOMENTS))
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    llama: str, tmp_path: Path, written_samples: list[list[int]], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    whole, output = tmp_path / "whole", tmp_path / "int4"
    assert run(llama, "-o", whole, "--head-bits", "8")[0] == 0
    real, written = work_folder.write_whole, 0

    def write_whole(path: Path, write: Callable[[Path], object]) -> None:
        nonlocal written
        written += 1
        if written == target and moment != "after":
            new = path.with_name(f"{path.name}.new")
            write(new)
            if moment == "within a write":
                os.truncate(new, new.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, write)
        if written == target:
            os.kill(os.getpid(), signal.SIGKILL)

    for module in (work_folder, checkpoint_module):
        monkeypatch.setattr(module, "write_whole", write_whole)
    # Killed in turn at the second and the third file that an attempt writes, so that some attempts end a layer and
    # others do not; once all layers are done, at each file of the checkpoint, which every attempt writes anew.
    seen, target = [], 2
    while not output.exists():
        in_a_child(lambda: run(llama, "-o", output, "--head-bits", "8"))
        seen.append(len(list(tmp_path.glob("int4.partial/part-*.safetensors"))))
        if seen[-1] < 4:
            target = 5 - target
        else:
            target = 1 if seen[-2] < 4 else target + 1
        assert len(seen) < 30
    assert len(set(seen)) >= 4 and seen[:-1] == sorted(seen[:-1])
    assert content(output) == content(whole) and not (tmp_path / "int4.partial").exists()


def test_a_full_disk_ends_in_one_line_and_leaves_what_is_done(
    llama: str, tmp_path: Path, written_samples: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output, saved = tmp_path / "whole", tmp_path / "int4", []
    assert run(llama, "-o", whole)[0] == 0

    def save(tensors: Any, path: Path, **options: Any) -> None:
        saved.append(path.name)
        if len(saved) == 4:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **options)

    monkeypatch.setattr(work_folder, "save_file", save)
    partial = tmp_path / "int4.partial"
    status, text = run(llama, "-o", output)
    assert (status, text.count("\n")) == (1, 0)
    assert "No space left on device" in text and text.endswith(f"the same command goes on with {partial}")
    assert {path.name for path in partial.iterdir()} == {
        *("plan.json", "samples.json", "part-0000.safetensors", "inputs-0001.safetensors", "inputs-0002.safetensors")
    }
    assert run(llama, "-o", output)[0] == 0
    assert content(output) == content(whole)


def test_a_stop_signal_ends_in_one_line(
    llama: str, tmp_path: Path, written_samples: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_module, "_walk", stopped)
    status, text = run(llama, "-o", tmp_path / "int4")
    assert (status, text) == (1, f"inflight: stopped; the same command goes on with {tmp_path / 'int4.partial'}")


@pytest.fixture
def half_done(llama: str, tmp_path: Path, written_samples: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of a run that was stopped after its samples."""

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    output = tmp_path / "int4"
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "_walk", fails)
        assert run(llama, "-o", output)[0] == 1
    return output


def test_another_runs_work_is_refused_by_name(llama: str, tmp_path: Path, half_done: Path) -> None:
    status, text = run(llama, "-o", half_done, "--seed", "7", "--head-bits", "4")
    assert status == 1
    assert "int4.partial has the work of another run: --head-bits 16, not 4, --seed 0, not 7; repeat" in text
    other = make_checkpoint("llama", tmp_path, seed=5, num_hidden_layers=3)
    status, text = run(other, "-o", half_done)
    assert status == 1 and 'another run: model "llama ' in text
    assert run(llama, "-o", half_done)[0] == 0


def test_a_folder_that_is_in_use_or_something_else_is_refused(llama: str, tmp_path: Path, half_done: Path) -> None:
    partial = tmp_path / "int4.partial"
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert run(llama, "-o", half_done) == (
        1,
        f"inflight: another process works in {partial}: wait for it, or choose another --output",
    )
    os.close(lock)
    (partial / "plan.json").write_text("{")
    assert run(llama, "-o", half_done)[1].endswith("plan.json is damaged: remove the folder, and begin anew")
    (partial / "plan.json").unlink()
    assert "is not the work of this command: it has samples.json" in run(llama, "-o", half_done)[1]


# Refusals


def test_wrong_options(llama: str, tmp_path: Path) -> None:
    assert run(llama, "-o", tmp_path / "x", "--group-size", "48") == (
        2,
        "inflight: --group-size 48: give 32, 64 or 128",
    )
    assert run(llama, "-o", tmp_path / "x", "--head-bits", "6") == (2, "inflight: --head-bits 6: give 4, 8 or 16")
    for there in (".", "/"):
        assert run(llama, "-o", there) == (2, f"inflight: --output {there} exists: name a folder to make")
    (tmp_path / "file.partial").write_text("no folder")
    assert run(llama, "-o", tmp_path / "file")[1].endswith("file.partial: File exists")
    none = "--group-size 128 divides the inputs of no linear layer of"
    assert none in run(llama, "-o", tmp_path / "x", "--group-size", "128")[1]
    assert not (tmp_path / "x.partial").exists()
    (tmp_path / "done").mkdir()
    said = f"inflight: {tmp_path / 'done'} exists: choose another --output, or remove it"
    assert run(llama, "-o", tmp_path / "done") == (1, said)
    (tmp_path / "done.partial").mkdir()
    left = f" and {tmp_path / 'done.partial'}, from which it was made"
    assert run(llama, "-o", tmp_path / "done") == (1, said + left)
    assert "takes at most 256 tokens; lower it" in run(llama, "-o", tmp_path / "x", "--sample-tokens", "257")[1]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2", "gpt2"])
def test_other_architectures_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    status, text = run(make_checkpoint(model_type, tmp_path), "-o", tmp_path / "x")
    what = "a mixture of experts" if model_type == "qwen3_moe" else "not one of the decoders that can be quantized"
    assert (status, text.count("\n")) == (1, 0)
    assert f"{model_type} ({model_type}) is {what}" in text and 'serve it with "quantization" in model.json' in text


def test_what_is_no_plain_checkpoint_is_refused_by_name(llama: str, tmp_path: Path) -> None:
    def refusal(model: str | Path) -> str:
        status, text = run(model, "-o", tmp_path / "x")
        assert (status, text.count("\n")) == (1, 0), text
        return text

    quantized = make_checkpoint("llama", tmp_path)
    write_quantized(quantized, "awq")
    assert "is quantized already (quant_method 'awq'): give the folder of the model's unquantized" in refusal(quantized)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a file, and a GGUF file has been quantized already" in refusal(tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "has no config.json: give the folder of a Hugging Face checkpoint" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(folder)
    (folder / "config.json").write_text((Path(llama) / "config.json").read_text())
    assert "has no weights in safetensors" in refusal(folder)
    tensors = load_file(Path(llama) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensors[key] for key in tensors if key != name}, folder / "model.safetensors")
    assert f"{name} is in none of its files, and config.json implies [48, 32]" in refusal(folder)
    save_file(tensors | {name: torch.ones(3, 3)}, folder / "model.safetensors")
    assert f"{name} has shape [3, 3], and config.json implies [48, 32]" in refusal(folder)
    os.truncate(folder / "model.safetensors", 4000)
    assert "model.safetensors is damaged (" in refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is damaged; download it again" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "is an adapter: merge it into its model" in refusal(folder)
    assert "no such folder, and the cache of the hub does not have it" in refusal("someone/nothing-like-this")


def test_weights_that_are_no_numbers_are_named(llama: str, tmp_path: Path, written_samples: list[list[int]]) -> None:
    tensors = load_file(Path(llama) / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text((Path(llama) / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    status, text = run(folder, "-o", tmp_path / "x")
    assert status == 1 and "model.layers.1.mlp.gate_proj cannot be quantized: its weights are infinite" in text


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_copied_weights_that_are_no_numbers_are_named(llama: str, tmp_path: Path, name: str) -> None:
    tensors = load_file(Path(llama) / "model.safetensors")
    tensors[name].view(-1)[-1] = torch.inf if name == "lm_head.weight" else torch.nan
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text((Path(llama) / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    status, text = run(folder, "-o", tmp_path / "x")
    assert status == 1 and f"{name} has values that are infinite or not numbers" in text


def test_too_little_memory_or_disk_is_said_before_anything_is_done(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "available_memory", lambda device: 2**20)
    assert "of memory; 1.00 MiB are free" in run(llama, "-o", tmp_path / "x")[1]
    monkeypatch.undo()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda folder: usage)
    assert "of disk, and" in run(llama, "-o", tmp_path / "x")[1]
    assert not list(tmp_path.iterdir())
