"""A start from kept weights: the bits of a full load, and what cannot be believed is refused, and made anew."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import integer_checkpoints
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint

from inflight.config import ConfigError, EngineConfig
from inflight.device import deferred_torch
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.stored_codes import StoredCodes
from inflight.loading import grammars, startup
from inflight.loading.check.cases import Case
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.draft_length import agreed_length
from inflight.loading.forward.native_adapters import NativeAdapters
from inflight.loading.load_errors import CannotKeep
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.saved import mapped_file, weights_file
from inflight.loading.saved.mapped_file import Damaged, Header, MappedFile, read_header
from inflight.loading.saved.weights_file import tensors_of
from inflight.loading.startup import REUSED, load_or_reuse, wait_until_kept

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture
DEMO = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("startup"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With norms of heads."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("startup"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> Path:
    caplog.set_level(logging.INFO, "inflight")
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig.from_dict({"model": path, "device": "cpu", "kv_cache_memory": "1MiB", **options})


def start(path: str, **options: Any) -> LoadedModel:
    loaded = load_or_reuse(config(path, **options))
    wait_until_kept()
    return loaded


def is_reused(log: Log) -> bool:
    """Whether all starts since the last call were made from kept weights."""
    phases = [record.message for record in log.records if record.name == "inflight.load_phases"]
    log.clear()
    return REUSED in phases and "reading the weights" not in phases


def logits(loaded: LoadedModel) -> list[np.ndarray]:
    """Of sequences that no check at load has computed."""
    cases = [Case(np.random.default_rng(seed).integers(0, VOCAB, 9 + 7 * seed).tolist()) for seed in (5, 6)]
    found = paged_logits(loaded.model, loaded.backend, cases, loaded.config.block_size, loaded.device, ())
    return [each.numpy() for each in found]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=["float32", "bfloat16", "int8", "int8 twice"],
)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_logits_of_the_second_start_are_those_of_the_first(
    model: str, options: dict[str, str], cache: Path, caplog: Log, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    first = start(path, **options)
    assert not is_reused(caplog)
    second = start(path, **options, max_num_seqs=7, cpu_threads=1)
    assert is_reused(caplog)
    assert all(map(np.array_equal, logits(first), logits(second)))
    facts = ["max_model_len", "vocab_size", "eos_token_ids", "dtype", "device", "attention_backend"]
    assert [getattr(first.info, fact) for fact in facts] == [getattr(second.info, fact) for fact in facts]
    assert second.info.grammars is not None
    assert second.layers.bytes_per_block == first.layers.bytes_per_block


_OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "tie_word_embeddings": True}


_CHAIN = "gptq act-order"  # query, key and value have orders of their own


def in_codes(stored: str, folder: Path) -> str:
    """A small model in one of the formats of `integer_checkpoints`, or a GGUF file of one type of blocks."""
    if stored in integer_checkpoints.WRITERS:
        path = make_checkpoint("qwen2", folder)  # with biases
        integer_checkpoints.write(path, stored, except_for=("layers.0.mlp.down",))
        return path
    file = folder / "model.gguf"
    gguf_files.as_gguf(make_checkpoint("llama", folder / "plain", **_OF_BLOCKS), file, stored)
    return str(file)


def parts_of(weight: PackedWeight | None) -> list[PackedWeight]:
    return [] if weight is None else [weight, *parts_of(weight.further)]


@pytest.mark.parametrize(
    "stored, options",
    [
        ("gptq", {}),
        (_CHAIN, {"dtype": "bfloat16"}),
        ("awq", {"quantization": "int8"}),  # of the layer that is left
        ("int-quantized tensor", {}),
        ("Q4_0", {}),
        ("Q4_K", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("Q6_K", {}),
    ],
)
def test_codes_of_a_checkpoint_are_kept_as_they_are(
    stored: str, options: dict[str, str], tmp_path: Path, cache: Path, caplog: Log
) -> None:
    path = in_codes(stored, tmp_path)
    first, second = (start(path, **{"dtype": "float32", **options}) for _ in range(2))
    assert all(map(np.array_equal, logits(first), logits(second)))
    found, kept = (parts_of(loaded.model.tables.layers[1].qkv) for loaded in (first, second))
    assert len(found) == len(kept) == (3 if stored == _CHAIN else 1)
    for weight, other in zip(found, kept):
        assert weight.struct.dtype == other.struct.dtype == StoredCodes.dtype
        assert torch.equal(weight.panels, other.panels)
    caplog.clear()
    start(path, **{"dtype": "float32", **options})
    assert is_reused(caplog)


@pytest.mark.parametrize("stored", [_CHAIN, "Q4_K"])
def test_a_changed_bit_in_any_tensor_of_kept_codes_is_found_and_a_changed_checkpoint_is_loaded(
    stored: str, tmp_path: Path, cache: Path, caplog: Log
) -> None:
    path = in_codes(stored, tmp_path)
    expected = logits(start(path, dtype="float32"))
    (file,) = cache.glob("*.iw")
    with file.open("r+b") as opened:
        layout = read_header(opened.fileno()).layout
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape, _ in layout.tensors]
        places = [layout.start + offset + size // 2 for size, (*_, offset) in zip(sizes, layout.tensors)]
        for at in places:
            byte = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([byte[0] ^ 16]), at)
            with pytest.raises(Damaged, match="weights are changed"):
                MappedFile(opened.fileno(), file.stem)
            os.pwrite(opened.fileno(), byte, at)
        MappedFile(opened.fileno(), file.stem)
        os.pwrite(opened.fileno(), bytes([os.pread(opened.fileno(), 1, places[-1])[0] ^ 1]), places[-1])
    caplog.clear()
    assert all(map(np.array_equal, logits(start(path, dtype="float32")), expected))
    assert "weights are changed; loading the checkpoint in full" in caplog.text
    caplog.clear()
    start(path, dtype="float32")
    assert is_reused(caplog)
    weights = Path(path) if stored == "Q4_K" else Path(path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # of a norm or a code
    weights.write_bytes(content)
    start(path, dtype="float32")
    assert not is_reused(caplog)


def test_the_length_of_requests_with_a_draft_model_is_remembered_by_content(
    llama: str, qwen3: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def agreed(draft: str, **options: Any) -> int:
        return agreed_length(config(llama, **options), config(draft), lambda: asked.append(0) or 100 + len(asked))

    assert [agreed(qwen3), agreed(qwen3), agreed(llama), agreed(qwen3, max_model_len=32)] == [101, 101, 102, 103]
    notes = list(cache.glob("*.length"))
    assert len(notes) == 3
    for note in notes:
        content = bytearray(note.read_bytes())
        content[content.index(b"length") + 6] ^= 1
        note.write_bytes(content)
    assert agreed(qwen3) == 104 and agreed(qwen3) == 104
    monkeypatch.setattr(startup, "instruction_set", lambda: "avx9")
    assert agreed(qwen3) == 105
    monkeypatch.setenv("INFLIGHT_CACHE", "off")
    assert [agreed(qwen3), agreed(qwen3)] == [106, 107]

    def refused() -> int:
        raise ConfigError("vocabulary")

    monkeypatch.delenv("INFLIGHT_CACHE")
    monkeypatch.setenv("INFLIGHT_CACHE", str(cache.parent / "other"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="vocabulary"):
            agreed_length(config(llama), config(qwen3), refused)


def test_forks_have_the_vocabulary_that_their_parent_has_read(tmp_path: Path, cache: Path) -> None:
    """In no thread, once one of them was asked for a grammar, and not that of a tokenizer that has changed since."""
    path = Path(make_checkpoint("llama", tmp_path / "checkpoint", vocab_size=32000, eos_token_id=2))
    shutil.copy(DEMO, path / "tokenizer.json")
    start(str(path))
    program = f"""
import os, time
from pathlib import Path
from inflight.config import EngineConfig
from inflight.grammars import guidance
from inflight.grammars.spec import GrammarSpec
from inflight.loading import startup
config = EngineConfig.from_dict({{"model": {str(path)!r}, "device": "cpu", "kv_cache_memory": "1MiB"}})
assert startup.heat(config)
assert not startup._later == []
def compiles():
    grammars, spec = startup.load_or_reuse(config).info.grammars, GrammarSpec("regex", "[0-9]+")
    while (outcome := grammars.outcome(spec)) is None:
        time.sleep(0.01)
    return outcome
def forked(work):
    if not os.fork():
        print(repr(work()), flush=True)
        os._exit(0)
    os.wait()
forked(lambda: startup.load_or_reuse(config).info.grammars.warm_up())
startup.heat_further()
print(len(startup._later), flush=True)
forked(compiles)
startup.heat_further()
print(len(os.listdir("/proc/self/task")), startup._later, flush=True)
real, guidance.read_vocabulary = guidance.read_vocabulary, None
for _ in range(2):
    forked(compiles)
file = Path({str(path)!r}, "tokenizer.json")
file.write_bytes(file.read_bytes() + b" ")
print("NoneType" in compiles())
guidance.read_vocabulary = real
print(repr(compiles()))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines() == ["None", "1", "''", "1 []", "''", "''", "True", "''"], done.stderr


def test_forks_of_a_gguf_file_that_was_replaced_read_its_own_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the first one was unpacked to is there still."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grammars, "_shared", {})
    plain = make_checkpoint("llama", tmp_path / "plain", **_OF_BLOCKS, eos_token_id=2)
    file, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for each in (file, other):
        gguf_files.as_gguf(plain, each)
    facts = config(str(file)), VOCAB, [2]
    grammars.share_grammars(*facts)
    shared = grammars.checkpoint_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is shared
    os.replace(other, file)
    assert grammars.checkpoint_grammars(*facts) is not shared
    grammars.share_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is grammars.checkpoint_grammars(*facts) is not shared


def test_forks_of_another_snapshot_read_its_own_vocabulary_and_the_hub_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local: list[Path | None] = [None]
    monkeypatch.setattr(grammars, "_shared", {})
    monkeypatch.setattr(grammars, "snapshot", lambda source, revision: local[0])
    monkeypatch.setattr(grammars, "checkpoint_file", None)
    facts = config("some/repository"), VOCAB, [2]
    grammars.share_grammars(*facts)
    assert not grammars._shared
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    shutil.copy(DEMO, tmp_path / "old")
    local[0] = tmp_path / "old"
    grammars.share_grammars(*facts)
    shared = grammars.checkpoint_grammars(*facts)
    assert grammars.checkpoint_grammars(*facts) is shared
    local[0] = tmp_path / "new"  # whose tokenizer is not here yet
    assert grammars.checkpoint_grammars(*facts) is not shared
    shutil.copy(DEMO, tmp_path / "new")
    assert grammars.checkpoint_grammars(*facts) is not shared


def test_kept_weights_know_where_adapters_belong(llama: str, cache: Path, caplog: Log) -> None:
    first = NativeAdapters(start(llama, dtype="float32").model)
    assert not is_reused(caplog)
    second = NativeAdapters(start(llama, dtype="float32").model)
    assert is_reused(caplog)
    assert first.layers == second.layers and len(first.layers) == 14
    assert second.layers["model.layers.1.mlp.down_proj"] == (48, 32)


def test_the_second_start_imports_no_transformers(llama: str, cache: Path, tmp_path: Path) -> None:
    """Neither of plain weights nor of codes; nor does a draft model's."""
    gguf = in_codes("Q4_K", tmp_path / "gguf")
    every = [{"model": path} for path in (llama, gguf, in_codes(_CHAIN, tmp_path))]
    every.append({"model": llama, "speculative_config": {"model": gguf, "kv_cache_memory": "1MiB"}})
    options = [{**each, "device": "cpu", "kv_cache_memory": "1MiB"} for each in every]
    program = f"""
import sys
from inflight.config import EngineConfig
from inflight.loading.startup import wait_until_kept
from inflight.runner.pipeline import make_runner
for options in {options!r}:
    runner = make_runner(EngineConfig.from_dict(options))
    assert (runner.draft_runner is None) == ("speculative_config" not in options)
wait_until_kept()
print([name for name in ("transformers", "torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""
    for expected in ("['transformers', 'torch._dynamo', 'torch.distributed.tensor']", "[]"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected, done.stderr


def test_parts_of_torch_are_left_out_until_they_are_used(llama: str, cache: Path) -> None:
    start(llama)
    program = f"""
import sys
from inflight.config import EngineConfig
from inflight.device.deferred_torch import import_torch
import_torch()
import torch
from inflight.engine.assembly import make_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.pipeline import make_runner
config = EngineConfig.from_dict({{"model": {llama!r}, "device": "cpu", "kv_cache_memory": "1MiB"}})
core = make_core(config, make_runner(config), listeners=[])
core.add_request(AddRequest(0, [1, 2, 3], SamplingParams(temperature=1.0, seed=1, max_tokens=3, logprobs=2)))
while core.has_work:
    core.step()
parts = ("torch._meta_registrations", "torch.export")
print([hasattr(sys.modules[name], "__file__") for name in parts], "torch._decomp" in sys.modules)
early = sys.modules["torch.export"]
import transformers
print([hasattr(sys.modules[name], "__file__") for name in parts], callable(torch.export.export))
print(torch.linalg.cholesky(torch.empty(3, 3, device="meta")).shape, callable(early.export))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    left_out, whole, used = done.stdout.splitlines()
    tried = torch.__version__.partition("+")[0] in deferred_torch._TRIED
    assert left_out == ("[False, False] False" if tried else "[True, True] True"), done.stderr
    assert whole == "[True, True] True"
    assert used == "torch.Size([3, 3]) True"


def test_torch_of_another_version_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(deferred_torch, "version", lambda _: "2.99.0+cpu")
    monkeypatch.setattr(deferred_torch.importlib, "import_module", imported.append)
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    before = [*sys.meta_path]
    deferred_torch.import_torch()
    assert imported == ["torch"] and sys.meta_path == before


def flipped(at: Callable[[Header], int]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def flip(path: Path, _: pytest.MonkeyPatch) -> None:
        with path.open("r+b") as file:
            position = at(read_header(file.fileno()))
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 4]))

    return flip


def truncated(path: Path, _: pytest.MonkeyPatch) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path, _: pytest.MonkeyPatch) -> None:
    os.truncate(path, 0)


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def for_everyone(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)


def linked(path: Path, _: pytest.MonkeyPatch) -> None:
    elsewhere = path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(elsewhere)


def renamed(path: Path, _: pytest.MonkeyPatch) -> None:
    """The whole file of another key."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    with path.open("wb") as file:
        weights_file.write(file.fileno(), "another", header.content, tensors)


def of_other_logits(path: Path, _: pytest.MonkeyPatch) -> None:
    """A whole file with a decoder that computes something else, as a library's other `cos` would."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    header.content["decoder"]["rotary_scaling"] *= 1.0001
    with path.open("wb") as file:
        weights_file.write(file.fileno(), header.key, header.content, tensors)


def of_another_version(path: Path, _: pytest.MonkeyPatch) -> None:
    """A whole file with other tables."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        tensors = [tensor.clone() for tensor in tensors_of(MappedFile(file.fileno()))]
    header.content["decoder"]["another_factor"] = 2.0
    with path.open("wb") as file:
        weights_file.write(file.fileno(), header.key, header.content, tensors)


REFUSED: list[tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = [
    (truncated, "truncated"),
    (emptied, "truncated"),
    (flipped(lambda header: 3), "format"),
    (flipped(lambda header: 9), "format"),
    (flipped(lambda header: 14), "header is changed"),
    (flipped(lambda header: 200), "header is changed"),
    (flipped(lambda header: header.layout.start), "weights are changed"),
    (flipped(lambda header: header.layout.start + header.layout.size - 1), "weights are changed"),
    (of_another_user, "belongs to user"),
    (for_everyone, "can be written by other users"),
    (linked, "symbolic links"),
    (renamed, "another, and"),
    (of_other_logits, "to the last bit"),
    (of_another_version, "another version"),
]


@pytest.mark.parametrize("damage, why", REFUSED, ids=[f"{number}-{why}" for number, (_, why) in enumerate(REFUSED)])
def test_what_cannot_be_believed_is_refused_and_made_anew(
    damage: Callable[[Path, pytest.MonkeyPatch], None], why: str, llama: str, cache: Path, caplog: Log
) -> None:
    expected = logits(start(llama))
    (file,) = cache.glob("*.iw")
    with pytest.MonkeyPatch.context() as monkeypatch:
        damage(file, monkeypatch)
        caplog.clear()
        assert all(map(np.array_equal, logits(start(llama)), expected))
    (warning,) = [record.message for record in caplog.records if "loading the checkpoint in full" in record.message]
    assert why in warning
    assert not is_reused(caplog)
    start(llama)
    assert is_reused(caplog) or damage in (of_another_user,)
    start(llama)
    assert is_reused(caplog)


def test_another_program_or_processor_loads_in_full(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(llama)
    monkeypatch.setattr(startup, "instruction_set", lambda: "avx9")
    caplog.clear()
    start(llama)
    assert "of another version or CPU" in caplog.text
    assert not is_reused(caplog)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"check_on_load": False}, "check_on_load"),
        ({"native_forward": False}, "native_forward"),
        ({"trust_remote_code": True}, "own code"),
        ({"load_format": "dummy"}, "not read from files"),
        ({"attention_backend": "reference"}, "through transformers"),
    ],
    ids=["unchecked", "modules", "own code", "dummy", "reference"],
)
def test_a_load_that_does_not_fit_is_not_kept(
    options: dict[str, Any], why: str, llama: str, cache: Path, caplog: Log
) -> None:
    start(llama, **options)
    assert why in caplog.text
    assert not list(cache.glob("*.iw"))


def test_a_load_whose_check_was_cut_is_not_kept(llama: str, cache: Path, caplog: Log) -> None:
    start(llama, max_model_len=16, num_gpu_blocks_override=1)
    assert "was not complete" in caplog.text
    start(llama, max_model_len=16)
    caplog.clear()
    start(llama, max_model_len=16, num_gpu_blocks_override=1)
    assert "too small" in caplog.text
    assert not is_reused(caplog)
    start(llama, max_model_len=16)
    assert is_reused(caplog)


def test_kept_weights_that_do_not_fit_the_memory_are_not_read(llama: str, cache: Path, caplog: Log) -> None:
    start(llama)
    caplog.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(startup, "available_memory", lambda _: 1024)
        start(llama)
    assert "and 1.00 KiB are available; loading the checkpoint in full" in caplog.text
    assert not is_reused(caplog)
    start(llama)
    assert is_reused(caplog)


def test_nothing_is_kept_if_the_cache_is_off(
    llama: str, tmp_path: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "inflight")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start(llama)
    assert "INFLIGHT_CACHE is off" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1KiB", "nonsense", "²"])
def test_a_bound_that_is_too_small_or_unreadable_is_said(
    size: str, llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_SIZE", size)
    start(llama)
    assert "INFLIGHT_CACHE_SIZE" in caplog.text
    assert not list(cache.glob("*.iw"))


def test_a_folder_that_cannot_be_written_is_said_and_does_not_matter(llama: str, cache: Path, caplog: Log) -> None:
    cache.parent.write_text("a file where the folder should be")
    start(llama)
    assert "are not kept for the next start" in caplog.text


def test_a_full_disk_is_said_and_leaves_nothing(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    start(llama)
    assert "No space left" in caplog.text
    assert not [path for path in cache.iterdir() if path.suffix in (".iw", ".part")]


def test_kept_weights_can_be_read_where_nothing_can_be_written(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(llama)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    caplog.clear()
    start(llama)
    assert is_reused(caplog)


def test_a_fork_server_leaves_transformers_out_if_weights_are_kept(llama: str, cache: Path) -> None:
    options = {"model": llama, "device": "auto", "dtype": "float32"}
    assert not startup.is_kept(EngineConfig.from_dict(options))
    start(llama, dtype="float32")
    assert startup.is_kept(EngineConfig.from_dict(options))
    assert not startup.is_kept(EngineConfig.from_dict({**options, "dtype": "bfloat16"}))
    assert not startup.is_kept(EngineConfig.from_dict({**options, "trust_remote_code": True}))


def test_a_decoder_with_parts_that_no_file_holds_is_not_kept(llama: str, cache: Path) -> None:
    from inflight.loading.saved.saved_model import content_of

    loaded = start(llama)
    loaded.model.tables.layers[0].qkv.struct.bias = 4711
    with pytest.raises(CannotKeep, match="the pointer bias of a packed weight"):
        content_of(loaded)


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter(["0" * 32, "1" * 32])
    monkeypatch.setattr(startup, "checkpoint_key", lambda *_: next(keys))
    start(llama)
    assert "has changed while it was loaded" in caplog.text
    assert not list(cache.glob("*.iw"))


def test_tensors_of_several_blocks_come_back_and_a_changed_bit_in_any_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_file, "BLOCK", 4096)
    monkeypatch.setattr(mapped_file, "BLOCK", 4096)
    tensors = [torch.arange(3000), torch.ones(7, 5, dtype=torch.bfloat16), torch.empty(0), torch.arange(9000)]
    with (tmp_path / "a.iw").open("w+b") as file:
        weights_file.write(file.fileno(), "a", {}, tensors)
        layout = read_header(file.fileno(), "a").layout
        assert len(layout.sums) == -(-layout.size // 4096) > 20
        found = tensors_of(MappedFile(file.fileno(), "a"))
        assert all(map(torch.equal, found, tensors))
        assert [each.dtype for each in found] == [each.dtype for each in tensors]
        for block in range(len(layout.sums)):
            at = layout.start + min(block * 4096 + 77, layout.size - 1)
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
            with pytest.raises(Damaged, match="weights are changed"):
                MappedFile(file.fileno(), "a")
            os.pwrite(file.fileno(), byte, at)
