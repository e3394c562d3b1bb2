"""`cp -r backend/inflight` into a bare backends folder, under any name, is all that Triton needs."""

from __future__ import annotations

import json
import shutil
import site
from pathlib import Path

import pytest
from model_entries import killed_at_the_end
from wire import post

from inflight_tools.installation import lay_out_interpreter
from inflight_tools.launcher import TritonServer

ROOT = Path(__file__).parents[2]

# Options of entries of vllm_backend; they change nothing here.
VLLM_OPTIONS = {
    "disable_log_requests": True,
    "distributed_executor_backend": "mp",
    "dtype": "float",
    "enable_chunked_prefill": True,
    "enable_lora": "false",
    "enforce_eager": "true",
    "max_num_seqs": "64",
    "max_seq_len_to_capture": 8192,
    "pipeline_parallel_size": 1,
    "task": "generate",
    "tensor_parallel_size": "1",
    "tokenizer_mode": "auto",
}
OURS = ("inflight", "triton_inflight", "_editable_impl_", "__editable__")

# Appended to the copy: each process that imports the package records where it found it.
REPORT = """

def _report() -> None:
    import importlib.util
    import json
    import os
    import sys

    others = ("inflight_tools", "inflight_client", "loadtest", "bench")
    line = {
        "name": __name__,
        "package": os.path.dirname(os.path.realpath(__file__)),
        "engine": "--fd" in sys.argv,
        "hub cache": os.environ.get("HF_HUB_CACHE"),
        "others": [name for name in others if importlib.util.find_spec(name)],
    }
    with open(os.environ["IMPORT_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\\n")


_report()
"""


def bare_interpreter(folder: Path) -> Path:
    """An environment for the stub with the packages that this one has, except ours."""
    programs = lay_out_interpreter(folder)
    library = next((folder / "lib").glob("python3.*/site-packages"))
    shutil.rmtree(library)
    library.mkdir()
    for packages in map(Path, site.getsitepackages()):
        for entry in packages.iterdir():
            if not entry.name.startswith(OURS):
                (library / entry.name).symlink_to(entry)
    return programs


def test_a_copy_of_the_backend_named_vllm_serves_an_entry_of_vllm_backend(
    server: TritonServer, keeping: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "backends" / "vllm"
    shutil.copytree(ROOT / "backend" / "inflight", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(REPORT)
    demo = ROOT / "model_repository" / "demo" / "1"
    entry = tmp_path / "models" / "demo"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n')
    options = json.loads((demo / "model.json").read_text()) | {"model": str(demo / "checkpoint")}
    (entry / "1" / "model.json").write_text(json.dumps(options | VLLM_OPTIONS | {"download_dir": "/models"}))
    report = tmp_path / "report"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("inflight_tools.launcher.lay_out_interpreter", bare_interpreter)
    request = {"text_input": "Return a list of", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    env = {**keeping, "IMPORT_REPORT": str(report)}
    with killed_at_the_end(TritonServer(entry.parent, backend_dir=copy, backend_name="vllm", env=env)) as copied:
        status, answer = post(f"http://{copied.http_address}/v2/models/demo/generate", request)
    assert status == 200, answer
    assert "[vllm] " in copied.log_text() and "[inflight] " not in copied.log_text()
    assert (200, answer) == post(f"http://{server.http_address}/v2/models/demo/generate", request)
    imports = [json.loads(line) for line in report.read_text().splitlines()]
    assert {line["engine"] for line in imports} == {False, True}, "both the stub and the engine process imported it"
    assert {line["name"] for line in imports} == {"inflight"}, "the folder was not taken for vLLM"
    assert {line["hub cache"] for line in imports if line["engine"]} == {"/models"}
    assert {line["package"] for line in imports} == {str(copy.resolve())}
    assert [line["others"] for line in imports] == [[]] * len(imports)
