"""Files of a checkpoint: in a directory, in a GGUF file, in the hub's cache, or on the hub.  No torch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["CheckpointFileError", "checkpoint_file", "gguf_file", "snapshot"]

_ANSWER_SECONDS = 5.0  # unless HF_HUB_ETAG_TIMEOUT says otherwise
_OUT_OF_ORDER = (502, 503, 504)  # statuses of a hub, or of a proxy before it, that a download would retry


class CheckpointFileError(ValueError):
    """A file of a checkpoint cannot be had; the message is one line with the cause and the fix."""


def gguf_file(source: str) -> Path | None:
    """The file, if a checkpoint is one file; all such are of llama.cpp's format, or refused."""
    return Path(source) if Path(source).is_file() else None


def snapshot(source: str, revision: str | None = None) -> Path | None:
    """Folder of a checkpoint's files on this machine: the directory, or the cached snapshot of a hub repository.

    Of a GGUF file it contains all but the weights.

    Raises:
        CheckpointFileError: the GGUF file cannot be served.
    """
    if Path(source).is_dir():
        return Path(source)
    if (file := gguf_file(source)) is not None:
        return _unpacked(file)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def checkpoint_file(source: str, name: str, revision: str | None = None) -> Path | None:
    """Path of one file of a checkpoint directory or hub repository; None if it has no such file.

    Without network the cached snapshot is what the repository has.

    Raises:
        CheckpointFileError: no such directory or repository, or neither the hub nor its cache answers; or a GGUF file
            cannot be served, or its tokenizer, if `name` is a file of it.
    """
    if Path(source).is_dir():
        return _file_in(Path(source), name)
    if (file := gguf_file(source)) is not None:
        return _file_of_gguf(file, name)
    if source.endswith(".gguf"):
        raise CheckpointFileError(f"{source}: no such file; give the path of a GGUF file, or a hub id")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    why = _unreachable(source)
    if why is not None:
        folder = snapshot(source, revision)
        if folder is None:
            raise CheckpointFileError(f"{source}: cannot get {name} from the hub: {why}")
        return _file_in(folder, name)
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except LocalEntryNotFoundError as error:  # the cause is the hub's answer, or that the connection broke
        raise CheckpointFileError(f"{source}: cannot get {name} from the hub: {_one_line(error.__cause__)}") from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointFileError(f"{source}: no such directory, and {_refusal(error, revision)}") from None


def _unpacked(file: Path) -> Path:
    from inflight.gguf.header import GgufError
    from inflight.gguf.unpacked import unpacked

    try:
        return unpacked(file)
    except GgufError as error:
        raise CheckpointFileError(f"{file}: {error}") from None


def _file_of_gguf(file: Path, name: str) -> Path | None:
    from inflight.gguf.unpacked import NO_TOKENIZER

    folder = _unpacked(file)
    if name == "tokenizer.json" and (reason := _file_in(folder, NO_TOKENIZER)) is not None:
        raise CheckpointFileError(f"{file}: {reason.read_text(encoding='utf-8')}")
    return _file_in(folder, name)


def _file_in(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _refusal(error: Exception, revision: str | None) -> str:
    """Why the hub does not give a file, with the fix."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "the hub gives it only to users who have accepted its licence: do so there, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub's repository has no revision {revision!r}"
    return f"the hub says: {_one_line(error)}"


@cache
def _unreachable(source: str) -> str | None:
    """Why the hub does not answer, with ways out; None if it does.

    It is asked once, where a download would retry for half a minute for each file.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _ANSWER_SECONDS)
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=seconds)
    except HFValidationError:  # a path; the download says so
        return None
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set, and the cache does not have it: unset it, or give a local folder"
    except HfHubHTTPError as error:
        if error.response.status_code not in _OUT_OF_ORDER:
            return None
        reason = f"HTTP status {error.response.status_code}"
    except Exception as error:  # of whatever library it uses to connect
        reason = _one_line(error) or type(error).__name__
    else:
        return None
    return (
        f"{constants.ENDPOINT} cannot be reached ({reason}), and the cache {constants.HF_HUB_CACHE} does not have it: "
        "give a local folder, or name a mirror with HF_ENDPOINT; HF_HUB_OFFLINE=1 uses the cache without asking"
    )


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
