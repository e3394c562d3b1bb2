"""A whole run: open, go on where the last one stopped, quantize layer by layer, write, rename."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

import inflight
from inflight.byte_sizes import format_bytes
from inflight.device.memory import available_memory
from inflight_tools.quantize.checkpoint import linear_layers, write_checkpoint
from inflight_tools.quantize.compressed import tensors_of
from inflight_tools.quantize.decoder_walk import Quantized, Scheme, Walk
from inflight_tools.quantize.progress import Shown
from inflight_tools.quantize.refused import Refused
from inflight_tools.quantize.samples import Wanted, samples_of
from inflight_tools.quantize.source import HEAD, Source, open_source
from inflight_tools.quantize.work_folder import WorkFolder

__all__ = ["Done", "write_quantized"]

_FORMAT = 1  # of what a run leaves; another one does not go on with it
_CHUNK = 2**24
_SPARE = 2**28  # bytes of memory for everything that does not grow with the model


@dataclass(frozen=True)
class Done:
    """
    Attributes:
        errors: the relative error of each quantized layer's outputs on the samples.
        ignored: linear layers of the decoder that stay as they are.
        num_bytes: of the weights' files.
        num_tokens: of the samples.
    """

    errors: dict[str, float]
    ignored: list[str]
    num_bytes: int
    num_tokens: int


def write_quantized(model: str, output: Path, scheme: Scheme, wanted: Wanted, shown: Shown) -> Done:
    """Write the checkpoint `output`, going on where an earlier run with the same arguments was stopped.

    Raises:
        Refused: it cannot be done; says why.
        OSError: a file cannot be read or written; what is done is kept.
    """
    if output.exists() or output.is_symlink():
        partial = WorkFolder.path_of(output)
        left = f" and {partial}, from which it was made" if partial.exists() else ""  # killed after its last step
        raise Refused(f"{output} exists: choose another --output, or remove it{left}")
    source = open_source(model)
    parts = _parts(source, scheme)
    _expect_some(source, scheme)
    _expect_room(source, scheme, wanted, output)
    shown.phase("reading the weights")
    with closing(WorkFolder(output, _plan(source, scheme, wanted), torch.get_num_threads())) as work:
        torch.set_num_threads(work.threads)
        shown.phase("writing samples" if wanted.text is None else "reading samples")
        samples = work.samples(lambda: samples_of(source, wanted))
        _walk(source, scheme, samples, work, parts, shown)
        shown.phase("writing the checkpoint")
        files = [work.part(index) for index in range(len(parts))]
        ignored = write_checkpoint(source, scheme, files, work.checkpoint)
        num_bytes = sum(path.stat().st_size for path in work.checkpoint.glob("*.safetensors"))
        done = Done(work.errors(), ignored, num_bytes, sum(map(len, samples)))
        work.publish()
    return done


def _parts(source: Source, scheme: Scheme) -> list[int | None]:
    """The index of each decoder layer, and None for the head."""
    layers: list[int | None] = list(range(len(source.layers)))
    width = source.model.get_input_embeddings().embedding_dim
    return [*layers, None] if scheme.head_bits < 16 and scheme.fits(width) else layers


def _walk(
    source: Source, scheme: Scheme, samples: list[list[int]], work: WorkFolder, parts: list[int | None], shown: Shown
) -> None:
    first = work.num_done
    if first == len(parts):
        return
    walk = Walk(source, samples, scheme)
    if first:
        walk.hidden = work.inputs([len(sample) for sample in samples])
    for place in range(first, len(parts)):
        shown.layer(place, len(parts))
        index = parts[place]
        found = walk.head() if index is None else walk.layer(index)
        is_last = place + 1 == len(parts)
        work.finish_part(place, _tensors(found), found.errors, None if is_last else walk.hidden)


def _tensors(found: Quantized) -> dict[str, torch.Tensor]:
    return {key: tensor for name, codes in found.codes.items() for key, tensor in tensors_of(name, codes).items()}


def _plan(source: Source, scheme: Scheme, wanted: Wanted) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    weights = sorted(source.folder.glob("*.safetensors"))
    return {
        "version": f"{inflight.__version__}.{_FORMAT}",
        "torch": torch.__version__,
        "model": f"{source.folder.name} {_digest([source.folder / 'config.json', *weights])}",
        "--group-size": scheme.group,
        "--head-bits": scheme.head_bits,
        "--samples": wanted.count,
        "--sample-tokens": wanted.length,
        "--seed": wanted.seed,
        "--text": None if wanted.text is None else f"{wanted.text.name} {_digest([wanted.text])}",
    }


def _digest(files: list[Path]) -> str:
    """Of the bytes of all files."""
    state = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    return state.hexdigest()


def _expect_some(source: Source, scheme: Scheme) -> None:
    """
    Raises:
        Refused: no layer can be quantized; no server reads a checkpoint that says it has codes, and has none.
    """
    sizes = {module.in_features for module in source.layers[0].modules() if isinstance(module, torch.nn.Linear)}
    if not any(scheme.fits(size) for size in sizes):
        raise Refused(
            f"--group-size {scheme.group} divides the inputs of no linear layer of {source.folder}, "
            f"{', '.join(map(str, sorted(sizes)))}: give a smaller one, or serve the checkpoint as it is"
        )


def _expect_room(source: Source, scheme: Scheme, wanted: Wanted, output: Path) -> None:
    """
    Raises:
        Refused: the memory or the disk is too small.
    """
    layer = sum(parameter.numel() for parameter in source.layers[0].parameters())
    widest = max(module.in_features for module in source.layers[0].modules() if isinstance(module, torch.nn.Linear))
    # A layer in float32 with a copy of its largest part; H in float32, and H, its factor and the factor's inverse in
    # float64.
    memory = 2 * 4 * layer + (4 + 3 * 8) * widest**2 + _SPARE
    free = available_memory(torch.device("cpu"))
    if memory > free:
        raise Refused(
            f"quantizing {source.folder} takes about {format_bytes(memory)} of memory; {format_bytes(free)} are free"
        )
    coded = {f"{name}.weight" for name in linear_layers(source) if name != HEAD}
    size = 0.0
    for name, header in source.headers.items():
        bits = 4 + 24 / scheme.group if name in coded else 8 * source.dtype.itemsize
        size += prod(header.shape) * bits / 8
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    left = shutil.disk_usage(folder).free
    inputs = 4 * wanted.count * wanted.length * source.model.get_input_embeddings().embedding_dim
    size += inputs  # of two layers at once; else the parts, and the checkpoint made of them
    if 2 * size > left:
        raise Refused(
            f"--output {output}: the work takes about {format_bytes(int(2 * size))} of disk, and {folder} has "
            f"{format_bytes(left)} left"
        )
