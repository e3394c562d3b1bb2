"""Files of kept weights: what names them, who writes them, and how many there are."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved import identity
from inflight.loading.saved.cache_folder import CacheFolder, cache_folder
from inflight.loading.saved.identity import DECISIVE, checkpoint_key, program_key
from inflight.loading.saved.newly_kept import NewlyKept

# Options that change neither which weights are read nor what is made of them, nor whether that is right; a new option
# belongs here or into DECISIVE.  Some of them keep a load from being kept at all.
IRRELEVANT = set(
    """
    model tokenizer revision tokenizer_revision download_dir trust_remote_code load_format device max_num_seqs
    max_num_batched_tokens itl_target_ms max_num_partial_prefills max_long_partial_prefills
    long_prefill_token_threshold async_scheduling speculative_config gpu_memory_utilization kv_cache_memory
    num_gpu_blocks_override watermark admission preemption_victim swap_space preemption_mode
    enable_prefix_caching kernel_config max_queue_size scheduling_policy priority_aging_seconds
    sjf_aging_seconds edf_default_timeout priority_classes tenants tenant_header stream_interval
    default_max_tokens generation_config max_logprobs max_n max_stop_strings max_bad_words max_stop_token_ids
    max_stop_bytes max_name_bytes max_input_bytes exclude_input_in_output wire_format seed cpu_threads
    chat_template chat_template_timeout trust_request_chat_template enforce_eager max_cudagraph_capture_size
    disable_log_stats python_executable step_trace otlp_traces_endpoint check_on_load native_forward max_replays
    engine_timeout spare_engine engine_start_timeout shared_step_rows short_prompt_share shed_on_predicted_wait
    drain_timeout pooler_config hf_overrides max_pooled_inputs kv_tiers kv_store_secret_file kv_listen kv_events_config
    enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_allowed_paths
    """.split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(make_checkpoint("llama", tmp_path_factory.mktemp("saved")))
    old = path.stat().st_mtime - 100
    for file in path.iterdir():
        os.utime(file, (old, old))
    return path


@pytest.fixture(scope="module")
def scratch(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may change, one byte at a time."""
    return Path(shutil.copytree(llama, tmp_path_factory.mktemp("scratch") / "copy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CacheFolder:
    return CacheFolder(tmp_path_factory.mktemp("folder") / "weights", 2**30)


def key(path: Path, folder: CacheFolder, **options: Any) -> str:
    return checkpoint_key(EngineConfig.from_dict({"model": str(path), **options}), folder)


def test_every_option_is_part_of_the_key_or_said_not_to_matter() -> None:
    assert sorted([*DECISIVE, *IRRELEVANT]) == sorted(EngineConfig.__struct_fields__)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "cpu"},
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"max_model_len": 32},
        {"quantization": "int8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_option_is_another_key(options: dict[str, Any], llama: Path, folder: CacheFolder) -> None:
    assert key(llama, folder, **options) != key(llama, folder)


def test_the_key_of_a_gguf_file_is_its_content(folder: CacheFolder, tmp_path: Path) -> None:
    """The loader says whether it can be served."""
    file, copy = tmp_path / "model.gguf", tmp_path / "another name"
    file.write_bytes(b"GGUF and more")
    copy.write_bytes(b"GGUF and more")
    assert key(file, folder) == key(copy, folder)
    copy.write_bytes(b"GGUF and less")
    assert key(file, folder) != key(copy, folder)


def test_a_copy_and_other_limits_are_the_same_key(llama: Path, folder: CacheFolder, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "README.md").write_text("no weights")
    assert key(copy, folder, max_num_seqs=3, cpu_threads=2, itl_target_ms=9) == key(llama, folder)


def test_what_says_that_a_checkpoint_has_no_head_is_part_of_the_key(
    llama: Path, folder: CacheFolder, tmp_path: Path
) -> None:
    """Without its modules.json, a full load says that the head is missing; kept weights would have a random one."""
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "modules.json").write_text("[]")
    assert key(copy, folder) != key(llama, folder)


@given(st.data())
def test_any_changed_byte_is_another_key(llama: Path, scratch: Path, folder: CacheFolder, data: st.DataObject) -> None:
    """Or the file cannot be read any more.  Its size and its mtime stay as they were."""
    name = data.draw(st.sampled_from(["config.json", "generation_config.json", "model.safetensors"]))
    content = bytearray((llama / name).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    limit = header if name == "model.safetensors" and data.draw(st.booleans()) else len(content)
    at, change = data.draw(st.integers(0, limit - 1)), data.draw(st.integers(1, 255))
    changed = scratch / name
    content[at] ^= change
    changed.write_bytes(content)
    os.utime(changed, ns=(0, (llama / name).stat().st_mtime_ns))
    try:
        assert key(scratch, folder) != key(llama, folder)
    except CannotKeep:
        assert name == "config.json"
    finally:
        shutil.copy2(llama / name, changed)
    assert key(scratch, folder) == key(llama, folder)


def test_a_digest_is_remembered_until_the_file_changes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = CacheFolder(tmp_path / "weights", 2**30), tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    monkeypatch.setattr(identity, "_SETTLED_NS", 0)
    first = identity.digest_of(path, folder)
    (note,) = folder.path.glob("*.digest")
    remembered = msgspec.msgpack.decode(note.read_bytes(), type=identity._Remembered)
    folder.write_note(note.name, msgspec.msgpack.encode(msgspec.structs.replace(remembered, digest=b"remembered")))
    assert identity.digest_of(path, folder) == b"remembered"
    times = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a tool does that keeps times
    assert identity.digest_of(path, folder) not in (first, b"remembered")


def test_a_young_file_is_read_each_time(llama: Path, tmp_path: Path) -> None:
    """It could change once more without a change of its times."""
    folder, path = CacheFolder(tmp_path / "weights", 2**30), tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    identity.digest_of(path, folder)
    assert not folder.path.exists()


def test_the_program_is_its_sources_kernels_versions_and_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, source = tmp_path / "kernels.so", tmp_path / "loading" / "loader.py"
    source.parent.mkdir()
    library.write_bytes(b"kernels")
    source.write_text("loads")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    keys = [program_key("avx2", library, "2.11"), program_key("avx512", library, "2.11")]
    keys.append(program_key("avx2", library, "2.12"))
    monkeypatch.setattr(identity, "version", lambda name: "99")
    keys.append(program_key("avx2", library, "2.11"))
    source.write_text("loads otherwise")
    keys.append(program_key("avx2", library, "2.11"))
    library.write_bytes(b"other kernels")
    keys.append(program_key("avx2", library, "2.11"))
    assert len(set(keys)) == 6


@pytest.mark.parametrize(
    "file, content, why",
    [
        ("adapter_config.json", "{}", "an adapter"),
        ("config.json", "[]", "no object"),
        ("config.json", "{", "cannot be read"),
        ("config.json", '{"transformers_weights": "other.safetensors"}', "configuration_files or transformers_weights"),
        (
            "config.json",
            '{"configuration_files": ["config.4.0.0.json"]}',
            "configuration_files or transformers_weights",
        ),
        ("config.json", None, "no config.json"),
        ("model.safetensors", None, "no safetensors"),
    ],
)
def test_other_checkpoints_are_not_kept(
    file: str, content: str | None, why: str, llama: Path, folder: CacheFolder, tmp_path: Path
) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / file).unlink(missing_ok=True)
    if content is not None:
        (copy / file).write_text(content)
    with pytest.raises(CannotKeep, match=why):
        key(copy, folder)


@pytest.mark.parametrize(
    "index, why",
    [
        ('{"weight_map": {"a": "first.safetensors", "b": "further/second.safetensors"}}', "not beside it"),
        ('{"weight_map": []}', "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_weights_in_another_folder_are_not_kept(
    index: str, why: str, llama: Path, folder: CacheFolder, tmp_path: Path
) -> None:
    """Their bytes would not be part of the key."""
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    (copy / "model.safetensors").rename(copy / "first.safetensors")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "first.safetensors"}}')
    key(copy, folder)
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CannotKeep, match=why):
        key(copy, folder)


def write(folder: CacheFolder, name: str, content: bytes = b"whole") -> bool:
    return folder.write(name, len(content), lambda descriptor: (os.write(descriptor, content), None)[1])


def test_of_two_writers_at_the_same_time_one_writes(tmp_path: Path) -> None:
    folder, begun, second_is_done = CacheFolder(tmp_path / "weights", 2**30), threading.Event(), threading.Event()
    written: list[bool] = []

    def slow(descriptor: int) -> None:
        os.write(descriptor, b"wh")
        begun.set()
        assert second_is_done.wait(60)
        os.write(descriptor, b"ole")

    first = threading.Thread(target=lambda: written.append(folder.write("a.iw", 5, slow)))
    first.start()
    assert begun.wait(60)
    assert not write(folder, "a.iw")
    assert not (folder.path / "a.iw").exists()
    assert write(folder, "b.iw"), "another file's writer does not wait, and leaves the unfinished one alone"
    second_is_done.set()
    first.join()
    assert written == [True]
    assert (folder.path / "a.iw").read_bytes() == b"whole"


def test_a_writer_that_was_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "weights", 2**30)
    program = f"""
import os, signal
from pathlib import Path
from inflight.loading.saved.cache_folder import CacheFolder
def fill(descriptor):
    os.write(descriptor, b"half of it, and longer than the whole")
    os.kill(os.getpid(), signal.SIGKILL)
CacheFolder(Path({str(folder.path)!r}), 2**30).write("a.iw", 5, fill)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    assert [path.name for path in folder.path.iterdir()] == ["a.part"]
    assert folder.open("a.iw") is None
    assert write(folder, "b.iw")
    assert not (folder.path / "a.part").exists(), "the next writer clears it away"
    subprocess.run([sys.executable, "-c", program], check=False)
    assert write(folder, "a.iw")
    assert (folder.path / "a.iw").read_bytes() == b"whole"


def test_a_failed_write_leaves_the_file_before_it(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "weights", 2**30)
    write(folder, "a.iw")

    def fails(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        folder.write("a.iw", 5, fails)
    assert (folder.path / "a.iw").read_bytes() == b"whole"
    assert [path.name for path in folder.path.iterdir()] == ["a.iw"]


def test_what_was_not_used_for_longest_is_dropped(tmp_path: Path) -> None:
    folder, block = CacheFolder(tmp_path / "weights", 3 * 65536), bytes(65536)
    for age, name in enumerate(["a.iw", "b.iw", "c.iw"]):
        write(folder, name, block)
        os.utime(folder.path / name, (age, age))
    descriptor = folder.open("a.iw")
    assert descriptor is not None
    os.close(descriptor)
    write(folder, "d.iw", block)
    assert sorted(path.name for path in folder.files()) == ["a.iw", "c.iw", "d.iw"]
    with pytest.raises(CannotKeep, match="exceed INFLIGHT_CACHE_SIZE"):
        folder.write("e.iw", 2**20, lambda _: None)


def test_a_disk_is_not_filled_to_the_last(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "weights", 2**60)
    with pytest.raises(CannotKeep, match=r"of the disk at .* free"):
        folder.write("a.iw", 2**59, lambda _: None)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "weights", 2**30)
    write(folder, "a.iw")
    folder.path.chmod(mode)
    for attempt in (lambda: folder.open("a.iw"), lambda: write(folder, "b.iw")):
        with pytest.raises(CannotKeep, match="can be written by other users"):
            attempt()


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "weights", 2**30)
    write(folder, "a.iw")
    os.mkfifo(folder.path / "b.iw", 0o600)
    with pytest.raises(CannotKeep, match="no plain file"):
        folder.open("b.iw")


def test_the_folder_is_private_and_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(**values: str) -> Path | None:
        for name in ("INFLIGHT_CACHE", "XDG_CACHE_HOME", "INFLIGHT_CACHE_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        folder = cache_folder()
        return folder and folder.path

    monkeypatch.setenv("HOME", "/home/someone")
    assert named() == Path("/home/someone/.cache/inflight/weights")
    assert named(XDG_CACHE_HOME="relative") == Path("/home/someone/.cache/inflight/weights")
    assert named(XDG_CACHE_HOME="/caches") == Path("/caches/inflight/weights")
    assert named(INFLIGHT_CACHE="~/kept") == Path("/home/someone/kept/weights")
    assert named(INFLIGHT_CACHE="off", XDG_CACHE_HOME="/caches") is None
    assert named(INFLIGHT_CACHE=str(tmp_path), INFLIGHT_CACHE_SIZE="5") == tmp_path / "weights"
    folder = cache_folder()
    assert folder is not None
    assert folder.max_bytes == 5
    folder = CacheFolder(tmp_path / "new" / "weights", 2**30)
    write(folder, "a.iw")
    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.path / "a.iw")] == [0o700, 0o600]


def test_a_spare_process_is_outdated_by_weights_that_it_has_not_seen(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another program are in its sight from the start, of no use, and followed by those of this one."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    cache = cache_folder()
    assert cache is not None
    config = EngineConfig.from_dict({"model": str(llama)})
    own = checkpoint_key(config, cache)

    def keep(name: str) -> None:
        assert cache.write(f"{name}.iw", 1, lambda descriptor: os.truncate(descriptor, 1))

    keep(f"{own}-old")
    newly_kept = NewlyKept(config)
    assert not newly_kept.any()
    keep("another-checkpoint")
    assert not newly_kept.any()
    keep(f"{own}-new")
    assert newly_kept.any()
    assert not NewlyKept(config).any()
    newly_kept = NewlyKept(config)
    keep(f"{own}-new")  # once more, in the place of damaged ones
    assert newly_kept.any()
    newly_kept = NewlyKept(config)
    cache.drop(f"{own}-new.iw")
    assert not newly_kept.any()
