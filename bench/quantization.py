#!/usr/bin/env python3
"""The loss of quality in each format of weights and KV cache: perplexity and divergence on Python's documentation.

    python bench/quantization.py [--models smollm2 shuffled demo] [--formats ...] [--tokens N] [--llama-cpp FOLDER]
        [--output FILE]

Each format computes the text in windows of 1024 tokens.  Its distributions of the next token are compared with those in
float32: perplexity, mean Kullback-Leibler divergence, and how often the most likely token is the same.  Numbers in fp8
and int4 are those of a GPU, computed on the CPU (by the twins of the tests).

"int4, GPTQ on own samples" is what `inflight quantize` makes of the model; its head stays in 16 bits.
"GGUF Q4_K_M" and the like are files that llama.cpp's `llama-quantize` (in FOLDER) makes of the weights in float32, as
Inflight serves them: in their codes, with inputs in eight bits, as llama.cpp has them.

- smollm2: SmolLM2-135M-Instruct (`make smollm2`) on the help topics of `pydoc`, which come with every Python; another
  Python has another text, so the record says which.
- shuffled: the same with its channels in another order (shuffled.py).  The weights of SmolLM2 come from a file that has
  them in four bits, in groups of 32, which formats with the same groups repeat; in another order they have to round.
- demo: the demo model on the documents that were held out from its training (see model_repository/demo).
"""

from __future__ import annotations

import hashlib
import math
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from attention_batch import metadata_of
from shuffled import write_shuffled
from torch import Tensor

sys.path.append(str(common.ROOT / "tests" / "support"))  # the twins

from fp8_twins import fp8_twins
from gguf_files import as_gguf
from int4_layers import int4_twins

from inflight.attention.base import forward_context
from inflight.config import EngineConfig
from inflight.loading.loader import LoadedModel, load
from inflight_tools.quantize.decoder_walk import Scheme
from inflight_tools.quantize.progress import Shown
from inflight_tools.quantize.run import write_quantized
from inflight_tools.quantize.samples import Wanted

EXACT = "float32"  # what the others are compared with
FORMATS: dict[str, dict[str, Any]] = {
    EXACT: dict(dtype="float32"),
    "bfloat16": dict(),
    "int8 KV": dict(kv_cache_dtype="int8"),
    "int8 weights": dict(quantization="int8"),
    "int8 weights and KV": dict(quantization="int8", kv_cache_dtype="int8"),
    "fp8 KV": dict(kv_cache_dtype="fp8"),
    "fp8 weights": dict(quantization="fp8"),
    "fp8 weights and KV": dict(quantization="fp8", kv_cache_dtype="fp8"),
    "int4 weights": dict(quantization="int4"),
    "int8 weights, head 6": dict(quantization="int8", head_bits=6),
    "int4 weights, head 4": dict(quantization="int4", head_bits=4),
    "int4 weights, head 6": dict(quantization="int4", head_bits=6),
    "int4 weights, head 16": dict(quantization="int4", head_bits=16),
    "int4 weights, GPU": dict(quantization="int4"),
    "int4, GPTQ on own samples": dict(),
    "GGUF Q4_0": dict(),
    "GGUF Q4_K_M": dict(),
    "GGUF Q8_0": dict(),
}
GPTQ = "int4, GPTQ on own samples"
GGUF = "GGUF "
WINDOW = 1024


class Subject(NamedTuple):
    """A model, and the text that it is measured on."""

    folder: Callable[[], Path]
    text: Callable[[], str]
    text_name: str


def topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def held_out() -> str:
    recipe = runpy.run_path(str(common.DEMO.parents[1] / "make_checkpoint.py"))
    _, documents = recipe["split"](recipe["stdlib_documents"]())
    return "\n\n".join(document.text for document in documents)


def shuffled() -> Path:
    folder = common.CACHE / "smollm2-shuffled"
    return folder if folder.exists() else write_shuffled(common.smollm2(), folder)


MODELS = {
    "smollm2": Subject(common.smollm2, topics, "the topics of pydoc"),
    "shuffled": Subject(shuffled, topics, "the topics of pydoc"),
    "demo": Subject(lambda: common.DEMO, held_out, "docstrings and topics held out from training"),
}


def windows(folder: Path, text: str, tokens: int) -> list[list[int]]:
    """The first ids of the text, split into windows that overlap by one token, so that `tokens` are predicted."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids[: tokens + 1]
    return [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]


def loaded(folder: Path, format: str, llama_cpp: str | None) -> LoadedModel:
    if format == GPTQ:
        with tempfile.TemporaryDirectory() as made:
            output = Path(made) / "int4"
            write_quantized(str(folder), output, Scheme(group=32, head_bits=16), Wanted(8, 512, seed=0), Shown(False))
            return _loaded(output, format)
    if format.startswith(GGUF):
        assert llama_cpp is not None
        with tempfile.TemporaryDirectory() as made:  # the loaded model refers to no file
            return _loaded(as_quantized(folder, Path(made), format.removeprefix(GGUF), llama_cpp), format)
    return _loaded(folder, format)


def as_quantized(folder: Path, made: Path, kind: str, llama_cpp: str) -> Path:
    """The checkpoint as a file of llama.cpp's, without its tokenizer."""
    plain, file = made / "F32.gguf", made / f"{kind}.gguf"
    as_gguf(str(folder), plain)
    subprocess.run([Path(llama_cpp) / "llama-quantize", plain, file, kind], check=True, capture_output=True)
    return file


def _loaded(folder: Path, format: str) -> LoadedModel:
    usual = {"model": str(folder), "device": "cpu", "dtype": "bfloat16"}
    usual |= {"kv_cache_memory": "64MiB", "max_model_len": WINDOW}
    twins = int4_twins() if format.endswith("GPU") else fp8_twins()
    with twins:
        return load(EngineConfig.from_dict(usual | FORMATS[format]))


@torch.inference_mode()
def log_probabilities(model: LoadedModel, ids: list[int]) -> Tensor:
    """float32 [n - 1, V]: of each possible token after each of the n ids but the last, computed in one step."""
    n, block_size = len(ids) - 1, model.config.block_size
    table = torch.arange(-(-n // block_size), dtype=torch.int32)[None]
    metadata = metadata_of([n], [n], table, block_size)
    with forward_context(metadata, model.backend):
        inputs, positions = torch.tensor([ids[:-1]]), torch.arange(n)[None]
        logits = model.model(input_ids=inputs, position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@dataclass
class Sums:
    """Over the tokens of the windows so far."""

    count: int = 0
    loss: float = 0.0
    squares: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def add(self, ids: list[int], exact: Tensor, found: Tensor) -> None:
        """The distributions `found` for a window, beside the `exact` ones."""
        actual = torch.tensor(ids[1:])[:, None]
        self.count += len(actual)
        self.loss -= found.gather(1, actual).double().sum().item()
        self.squares += (found.gather(1, actual) - exact.gather(1, actual)).double().square().sum().item()
        self.divergence += (exact.exp() * (exact - found)).sum(-1).double().sum().item()
        self.same += int((exact.argmax(-1) == found.argmax(-1)).sum().item())

    def figures(self) -> dict[str, float]:
        """The divergence is in nats per token."""
        return {
            "perplexity": math.exp(self.loss / self.count),
            "log_probability_rms_change": math.sqrt(self.squares / self.count),
            "kl_divergence": self.divergence / self.count,
            "same_most_likely_token": self.same / self.count,
        }


def measure(
    folder: Path, text: list[list[int]], formats: list[str], llama_cpp: str | None = None
) -> dict[str, dict[str, float]]:
    """Figures of each format.

    All models are loaded at once, because the exact distributions of the whole text would take gigabytes.
    """
    models = {name: loaded(folder, name, llama_cpp) for name in dict.fromkeys([EXACT, *formats])}
    sums = {name: Sums() for name in models}
    for ids in text:
        exact = log_probabilities(models[EXACT], ids)
        for name, model in models.items():
            sums[name].add(ids, exact, exact if name == EXACT else log_probabilities(model, ids))
    return {name: of_one.figures() for name, of_one in sums.items()}


def main() -> None:
    args = common.options(
        __doc__,
        models=dict(choices=list(MODELS), default=["smollm2"], nargs="+"),
        formats=dict(choices=list(FORMATS), nargs="+", help="default: all; those of llama.cpp only with --llama-cpp"),
        tokens=dict(type=int, default=8 * WINDOW, help="of each text"),
        llama_cpp=dict(metavar="FOLDER", help="folder of llama.cpp's programs"),
    )
    formats = args.formats or [name for name in FORMATS if args.llama_cpp or not name.startswith(GGUF)]
    if args.llama_cpp is None and any(name.startswith(GGUF) for name in formats):
        raise SystemExit(f"formats of {GGUF}need --llama-cpp FOLDER, whose llama-quantize writes the files")
    runs: dict[str, dict[str, dict[str, float]]] = {}
    texts: dict[str, dict[str, Any]] = {}
    for name in args.models:
        subject = MODELS[name]
        folder, text = subject.folder(), subject.text()
        prompts = windows(folder, text, args.tokens)
        texts[name] = {
            "text": f"{subject.text_name}, Python {platform.python_version()}",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": sum(len(ids) - 1 for ids in prompts),
        }
        print(f"{name}: {texts[name]['tokens']} tokens of {texts[name]['text']}", flush=True)
        runs[name] = measure(folder, prompts, formats, args.llama_cpp)
        for format, run in runs[name].items():
            print(
                f"  {format:<25} perplexity {run['perplexity']:8.4f}   KL divergence {run['kl_divergence']:.6f} nats   "
                f"same most likely token {run['same_most_likely_token']:.2%}"
            )
    common.record(args, runs, texts=texts, window=WINDOW)


if __name__ == "__main__":
    main()
