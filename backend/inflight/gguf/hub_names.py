"""Names of GGUF files on the hub, as llama.cpp and vLLM write them: `org/repo:Q4_K_M` and `org/repo/name.gguf`.

No torch, and no network: `inflight.hub` lists repositories and downloads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["HubName", "HubNameError", "choose", "hub_name", "listed"]

_SUFFIX = ".gguf"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.+-]+)|/((?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf))")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_NO_MODEL = re.compile(r"mmproj|imatrix|^(mtp|eagle3)-")  # projectors of images, statistics, draft heads
_MOST_LISTED = 24


class HubNameError(ValueError):
    """A repository does not have the file that is asked for, or has several; the message is one line."""


@dataclass(frozen=True)
class HubName:
    """
    Attributes:
        repository: its id.
        tag: how the file's name ends, before ".gguf"; or None.
        file: its path in the repository; or None.
    """

    repository: str
    tag: str | None
    file: str | None


def hub_name(source: str) -> HubName | None:
    """The GGUF file on the hub that `source` names, if it does; one in a folder of this machine is none."""
    match = _NAME.fullmatch(source)
    if match is None or Path(source.partition("/")[0]).is_dir():
        return None
    return HubName(*match.groups())


def choose(names: Sequence[str], tag: str) -> str:
    """The one of a repository's files whose name ends with `tag`, in any case.

    If other such names only put something between the name of the model and the tag, as in
    `model-UD-Q4_K_M.gguf` beside `model-Q4_K_M.gguf`, the shortest one is meant.

    Raises:
        HubNameError: there is none, there are several, or it is split.
    """
    ending = re.compile(rf"(^|.*[-./]){re.escape(tag)}", re.IGNORECASE)
    whole = [name for name in _models(names) if ending.fullmatch(_stem(name)) and not _parts(name)]
    if not whole:
        split = [name for name in _models(names) if ending.fullmatch(_PART.sub("", _stem(name)))]
        if split:
            raise HubNameError(
                f"{tag} is split into {_parts(split[0])} files, which are not served: download them, merge them with "
                f"llama-gguf-split --merge, and give the file; or choose among {listed(names)}"
            )
        raise HubNameError(f"the repository has no GGUF file whose name ends with {tag}; it has {listed(names)}")
    first = min(whole, key=lambda name: (len(name), name))
    model = _stem(first)[: -len(tag)].lower()
    if others := [name for name in whole if not _stem(name).lower().startswith(model)]:
        raise HubNameError(
            f"several files are {tag}: {', '.join(sorted([first, *others]))}; name the file instead of {tag}"
        )
    return first


def listed(names: Sequence[str]) -> str:
    """The files among `names` that can be served, for a message."""
    found = sorted(name for name in _models(names) if not _parts(name))
    more = len(found) - _MOST_LISTED
    return (
        ", ".join(found[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "") if found else "none that is whole"
    )


def _models(names: Sequence[str]) -> list[str]:
    paths = [PurePosixPath(name) for name in names]
    return [str(path) for path in paths if path.suffix == _SUFFIX and not _NO_MODEL.search(path.name.lower())]


def _stem(name: str) -> str:
    return name.removesuffix(_SUFFIX)


def _parts(name: str) -> int:
    """Of how many files it is one; 0 if it is whole."""
    match = _PART.search(_stem(name))
    return 0 if match is None else int(match[1])
