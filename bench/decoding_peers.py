"""Other engines for `bench/decoding.py`: llama.cpp and OpenVINO GenAI, on the same checkpoint in their own formats.

llama.cpp: `bench/peers/write_gguf.py` writes the checkpoint in 16 bits, `llama-quantize` the rest, and
`llama-batched-bench` decodes.  OpenVINO: `optimum-cli export openvino --weight-format int4|int8`.  Each converts once;
the results are in the benchmarks' cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

LLAMA_CPP = ("Q8_0", "Q4_0", "Q4_K_M")
OPENVINO = ("int8", "int4")
_SCRIPTS = Path(__file__).parent / "peers"


def names(arguments: dict[str, Any]) -> list[str]:
    """The sides for which `arguments` names an installation."""
    llama = [f"llama.cpp {kind}" for kind in LLAMA_CPP] if arguments["llama_cpp"] else []
    return llama + ([f"OpenVINO {kind}" for kind in OPENVINO] if arguments["openvino"] else [])


def convert(side: str, arguments: dict[str, Any]) -> Path:
    """The checkpoint in the side's format."""
    engine, kind = side.split()
    folder = Path(arguments["checkpoint"])
    if engine == "OpenVINO":
        converted = common.CACHE / "openvino" / f"{folder.name}-{kind}"
        if not (converted / "openvino_model.xml").exists():
            tool = Path(arguments["openvino"]).parent / "optimum-cli"
            options = ["--task", "text-generation-with-past", "--weight-format", kind]
            subprocess.run([tool, "export", "openvino", "--model", folder, *options, converted], check=True)
        return converted
    return gguf(kind, arguments)


def gguf(kind: str, arguments: dict[str, Any]) -> Path:
    """llama.cpp's file of a type, such as Q4_K_M."""
    folder = Path(arguments["checkpoint"])
    converted = common.CACHE / "gguf" / f"{folder.name}-{kind}.gguf"
    if not converted.exists():
        if not arguments["llama_cpp"]:
            raise SystemExit(f"{kind} needs --llama-cpp FOLDER, whose llama-quantize writes the file")
        plain = common.CACHE / "gguf" / f"{folder.name}-F16.gguf"
        plain.parent.mkdir(parents=True, exist_ok=True)
        if not plain.exists():
            subprocess.run([sys.executable, _SCRIPTS / "write_gguf.py", folder, plain], check=True)
        subprocess.run([Path(arguments["llama_cpp"]) / "llama-quantize", plain, converted, kind], check=True)
    return converted


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    """The figures that `decoding.run` gives for Inflight, in a process of the engine's own."""
    file = convert(side, arguments)
    if side.startswith("OpenVINO"):
        return _openvino(file, arguments)
    return _llama_cpp(file, arguments)


def _llama_cpp(file: Path, arguments: dict[str, Any]) -> common.Run:
    streams = [str(count) for count in arguments["streams"]]
    found = _batched_bench(file, arguments, ["-npp", "16", "-ntg", str(arguments["steps"]), "-npl", ",".join(streams)])
    figures = {f"decode {line['pl']}": line["speed_tg"] for line in found}
    (prompt,) = _batched_bench(file, arguments, ["-npp", str(arguments["prompt"]), "-ntg", "1", "-npl", "1"])
    return {**figures, "prefill": prompt["speed_pp"]}


def _batched_bench(file: Path, arguments: dict[str, Any], options: list[str]) -> list[dict[str, Any]]:
    tool = Path(arguments["llama_cpp"]) / "llama-batched-bench"
    threads = ["-t", str(arguments["threads"]), "-tb", str(arguments["threads"])]
    command = [
        str(tool),
        "-m",
        str(file),
        "-c",
        "4096",
        "-b",
        "2048",
        "-ub",
        "512",
        *threads,
        "--output-format",
        "jsonl",
    ]
    done = subprocess.run(
        [*command, *options], env=common.peer_environment(), capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _openvino(folder: Path, arguments: dict[str, Any]) -> common.Run:
    vocab = json.loads((Path(arguments["checkpoint"]) / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="inflight-decoding-") as temporary:
        job, result = Path(temporary) / "job.json", Path(temporary) / "result.json"
        names = ("streams", "steps", "warm_up_steps", "prompt", "threads")
        task = {name: arguments[name] for name in names} | {"checkpoint": str(folder), "vocab_size": vocab}
        job.write_text(json.dumps({**task, "result": str(result)}))
        subprocess.run(
            [arguments["openvino"], _SCRIPTS / "decode_openvino.py", job], env=common.peer_environment(), check=True
        )
        figures: common.Run = json.loads(result.read_text())["figures"]
        return figures


def versions(arguments: dict[str, Any]) -> dict[str, str]:
    """Of the engines that ran."""
    found = {}
    if arguments["llama_cpp"]:
        tool = Path(arguments["llama_cpp"]) / "llama-batched-bench"
        printed = subprocess.run([tool, "--version"], capture_output=True, text=True).stderr
        found["llama.cpp"] = next((line for line in printed.splitlines() if line.startswith("version")), "unknown")
    if arguments["openvino"]:
        ask = "import openvino_genai; print(openvino_genai.__version__)"
        command = [arguments["openvino"], "-c", ask]
        found["openvino-genai"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found
