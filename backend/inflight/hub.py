"""Files of a checkpoint: in a directory, in the hub's cache, or on the hub.  No torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["CheckpointFileError", "checkpoint_file", "snapshot"]


class CheckpointFileError(ValueError):
    """A file of a checkpoint cannot be had; the message says why."""


def snapshot(source: str, revision: str | None = None) -> Path | None:
    """Folder of a checkpoint's files on this machine: the directory, or the cached snapshot of a hub repository."""
    if Path(source).is_dir():
        return Path(source)
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
        CheckpointFileError: no such directory or repository, or neither the hub nor its cache answers.
    """
    folder = snapshot(source, revision)
    if folder is not None and (Path(source).is_dir() or not _answers(source)):
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except LocalEntryNotFoundError as error:  # no network, and not in the cache
        raise CheckpointFileError(f"{source}: cannot get {name} from the hub: {error}") from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointFileError(f"{source}: no such directory, and the hub says: {error}") from None


@cache
def _answers(source: str) -> bool:
    """Whether the hub answers: asked once, where a download would retry for half a minute for each file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except HfHubHTTPError:
        return True
    except Exception:  # of whatever library it uses to connect
        return False
    return True
