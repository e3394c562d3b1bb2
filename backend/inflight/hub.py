"""Files of a checkpoint: in a directory, in a GGUF file, in the hub's cache, or on the hub.  No torch."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

from inflight.gguf.hub_names import HubName, HubNameError, choose, hub_name, listed

__all__ = ["CheckpointFileError", "checkpoint_file", "gguf_file", "gguf_names", "snapshot"]

_ANSWER_SECONDS = 5.0  # unless HF_HUB_ETAG_TIMEOUT says otherwise
_OUT_OF_ORDER = (502, 503, 504)  # statuses of a hub, or of a proxy before it, that a download would retry
_downloaded: dict[tuple[str, str | None], Path] = {}  # GGUF files of the hub, by name and revision


class CheckpointFileError(ValueError):
    """A file of a checkpoint cannot be had; the message is one line with the cause and the fix."""


def gguf_file(source: str, revision: str | None = None) -> Path | None:
    """The GGUF file that a checkpoint is: a file, or one of a hub repository, which is downloaded; None if it is none.

    Any file is taken for one, and refused if it is of another format.

    Raises:
        CheckpointFileError: the hub, or its cache, does not have it.
    """
    if Path(source).is_file():
        return Path(source)
    if Path(source).is_dir() or (named := hub_name(source)) is None:
        return None
    known = _downloaded.get((source, revision))
    if known is None or not known.is_file():
        known = _downloaded[source, revision] = _gguf_of_hub(source, named, revision)
    return known


def gguf_names(source: str, revision: str | None = None) -> list[str]:
    """Names of the GGUF files in a directory or hub repository.

    Raises:
        CheckpointFileError: the hub does not say.
    """
    if Path(source).is_dir():
        return _names_in(Path(source))
    return [name for name in _names_on_hub(source, source, revision) if name.endswith(".gguf")]


def snapshot(source: str, revision: str | None = None) -> Path | None:
    """Folder of a checkpoint's files on this machine: the directory, or the cached snapshot of a hub repository.

    Of a GGUF file it contains all but the weights.

    Raises:
        CheckpointFileError: the GGUF file cannot be served.
    """
    if Path(source).is_dir():
        return Path(source)
    if (file := gguf_file(source, revision)) is not None:
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
    if (file := gguf_file(source, revision)) is not None:
        return _file_of_gguf(file, name)
    if source.endswith(".gguf"):
        raise CheckpointFileError(f"{source}: no such file; give the path of a GGUF file, or a hub id")
    why = _unreachable(source)
    if why is not None:
        folder = snapshot(source, revision)
        if folder is None:
            raise CheckpointFileError(f"{source}: cannot get {name} from the hub: {why}")
        return _file_in(folder, name)
    return _download(source, source, name, revision)


def _download(source: str, repository: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except LocalEntryNotFoundError as error:  # the cause is the hub's answer, or that the connection broke
        raise CheckpointFileError(f"{source}: cannot get {name} from the hub: {_one_line(error.__cause__)}") from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointFileError(f"{source}: no such directory, and {_refusal(error, revision)}") from None


def _gguf_of_hub(source: str, named: HubName, revision: str | None) -> Path:
    why = _unreachable(named.repository)
    if why is not None:
        return _gguf_of_cache(source, named, revision, why)
    try:
        names = [] if named.file else _names_on_hub(source, named.repository, revision)
    except CheckpointFileError as error:  # it answers, but not this question: a rate limit, a token that expired
        return _gguf_of_cache(source, named, revision, str(error).removeprefix(f"{source}: "))
    try:
        name = named.file or choose(names, named.tag or "")
    except HubNameError as error:
        raise CheckpointFileError(f"{source}: {error}") from None
    found = _download(source, named.repository, name, revision)
    if found is None:
        others = listed(_names_on_hub(source, named.repository, revision))
        raise CheckpointFileError(f"{source}: no such file, and the hub's repository has {others}")
    return found


def _gguf_of_cache(source: str, named: HubName, revision: str | None, why: str) -> Path:
    """
    Args:
        why: the hub does not answer.
    """
    folder = snapshot(named.repository, revision)
    names = [] if folder is None else _names_in(folder)
    with contextlib.suppress(HubNameError):
        found = None if folder is None else _file_in(folder, named.file or choose(names, named.tag or ""))
        if found is not None:
            return found
    cached = f"; of this repository the cache has {listed(names)}" if names else ""
    raise CheckpointFileError(f"{source}: cannot get it from the hub: {why}{cached}")


def _names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def _names_on_hub(source: str, repository: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repository, revision=revision)
    except Exception as error:  # of whatever library it uses to connect
        raise CheckpointFileError(f"{source}: no such file, and {_refusal(error, revision)}") from None


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
