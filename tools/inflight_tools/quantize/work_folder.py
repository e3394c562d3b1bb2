"""The work of a run so far, from which the next one goes on: `DIR.partial` beside the checkpoint-to-be.

plan.json             what is made: model, options and version; only a run with the same goes on
samples.json          token ids
part-0003.safetensors a decoder layer's codes; it is there if and only if that layer is done
inputs-0004.safetensors  inputs of the next layer

A file has its name only once all of it is on the disk.  A layer is done with its part; the inputs of the next layer
precede it, and those of its own are removed after it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight_tools.quantize.refused import Refused

__all__ = ["WorkFolder", "save_tensors", "write_whole"]

_PLAN, _SAMPLES, _CHECKPOINT = "plan.json", "samples.json", "checkpoint"
_INPUTS = "inputs-{:04}.safetensors"
_PART = "part-{:04}.safetensors"


class WorkFolder:
    """Locked until it is closed.

    Args:
        output: the folder that will have the checkpoint.
        plan: what is made, as JSON.
        threads: of this process.

    Attributes:
        checkpoint: the folder that is renamed at the end.
        threads: of the process that began, since the last bits of sums depend on their number.

    Raises:
        Refused: it has the work of another plan, or another process works there.
        OSError: it cannot be written.
    """

    def __init__(self, output: Path, plan: Mapping[str, Any], threads: int) -> None:
        self.path = self.path_of(output)
        self.checkpoint = self.path / _CHECKPOINT
        self._output = output
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Refused(f"another process works in {self.path}: wait for it, or choose another --output") from None
        try:
            self.threads = self._expect(plan, threads)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def path_of(output: Path) -> Path:
        """The folder for the work on `output`."""
        return output.with_name(f"{output.name}.partial")

    def _expect(self, plan: Mapping[str, Any], threads: int) -> int:
        """Write the plan, or compare it with the one that is there; returns the number of threads."""
        found = self._plan()
        if found is None or not (self.path / _SAMPLES).exists():  # nothing is done that another plan could not use
            found = {**plan, "threads": threads}
            write_whole(self.path / _PLAN, lambda path: path.write_text(json.dumps(found, indent=1)))
        threads = int(found.pop("threads", threads))
        if found != plan:
            changed = ", ".join(
                f"{key} {_short(found.get(key))}, not {_short(plan.get(key))}"
                for key in sorted({*found, *plan})
                if found.get(key) != plan.get(key)
            )
            raise Refused(
                f"{self.path} has the work of another run: {changed}; repeat that run, choose another --output, or "
                "remove the folder"
            )
        return threads

    def close(self) -> None:
        """Let others work here."""
        os.close(self._lock)

    def samples(self, make: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Those of the first run."""
        file = self.path / _SAMPLES
        if not file.exists():
            made = make()
            write_whole(file, lambda path: path.write_text(json.dumps(made)))
        return json.loads(file.read_text())

    @property
    def num_done(self) -> int:
        """Parts that are whole, from the first on."""
        count = 0
        while (self.path / _PART.format(count)).exists():
            count += 1
        return count

    def part(self, index: int) -> Path:
        """The file of a part."""
        return self.path / _PART.format(index)

    def inputs(self, lengths: Sequence[int]) -> list[Tensor]:
        """float32 [T, H] of each sample: the inputs of the first part that is not done."""
        whole = load_file(self.path / _INPUTS.format(self.num_done))["inputs"]
        return list(whole.split(list(lengths)))

    def finish_part(
        self, index: int, tensors: Mapping[str, Tensor], errors: Mapping[str, float], inputs: Sequence[Tensor] | None
    ) -> None:
        """A part is done.

        Args:
            inputs: of the next one; None if there is none.
        """
        if inputs is not None:
            save_tensors(self.path / _INPUTS.format(index + 1), {"inputs": torch.cat(list(inputs))})
        save_tensors(self.part(index), tensors, {"errors": json.dumps(errors)})
        (self.path / _INPUTS.format(index)).unlink(missing_ok=True)

    def errors(self) -> dict[str, float]:
        """Relative errors of the layers in all parts."""
        found: dict[str, float] = {}
        for index in range(self.num_done):
            with safe_open(self.part(index), framework="pt") as tensors:
                found |= json.loads(tensors.metadata()["errors"])
        return found

    def publish(self) -> None:
        """Rename the finished checkpoint, and drop the rest."""
        self.checkpoint.rename(self._output)
        _sync(self._output.parent)
        self.drop()

    def drop(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path)

    def _plan(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.path / _PLAN).read_text())
        except ValueError:
            found = None
        except FileNotFoundError:
            others = [path.name for path in self.path.iterdir() if not path.name.endswith(".new")]
            if others:
                raise Refused(f"{self.path} is not the work of this command: it has {min(others)}") from None
            return None
        if not isinstance(found, dict):
            raise Refused(f"{self.path / _PLAN} is damaged: remove the folder, and begin anew")
        return found


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; it has its name only once it is whole.

    Raises:
        OSError: it cannot be written.
    """

    def write(new: Path) -> None:
        try:
            save_file(dict(tensors), new, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # the library's form of an OSError
            raise OSError(_number(str(error)), str(error)) from error

    write_whole(path, write)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under another name, and give it its name once it is on the disk.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        write(new)
        _sync(new)
        new.rename(path)
        _sync(path.parent)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(message: str) -> int:
    """The errno in a message of Rust's: "... (os error 28)"."""
    _, found, rest = message.rpartition("os error ")
    digits = rest.partition(")")[0]
    return int(digits) if found and digits.isdigit() else errno.EIO


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
