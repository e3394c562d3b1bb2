"""Decides whether a `model.json` is trusted: it can come from the operator's repository, or from a load request.

With explicit model control, every client that can load models can send a model's files; Triton writes them to a folder
of its own and loads the model from there.  Such a `model.json` must not run code.  Triton does not tell the backend
the origin of the folder, so the backend compares it with the repositories on the server's command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.config import ConfigError, EngineConfig

__all__ = ["TRUST", "check_model_json_trust", "repositories"]

TRUST = "INFLIGHT_TRUST_MODEL_JSON"

_OPTIONS = ("--model-repository", "--model-store")
_SHORTEST = len("--model-r")  # getopt accepts any unambiguous prefix


def check_model_json_trust(
    config: EngineConfig,
    model_dir: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
    known: Sequence[Path] | None = None,
) -> None:
    """Refuse keys that run code or choose where to write or send, unless the model is in the operator's own repository.

    Args:
        model_dir: the version's folder, which contains `model.json`; resolved.
        name: the model's.
        environment, known: for tests; default: this process's environment, and `repositories()`.

    Raises:
        ConfigError: such a key in a `model.json` that is not certainly the operator's.
    """
    environment = os.environ if environment is None else environment
    named = [
        key
        for key, value in (
            ("python_executable", config.python_executable),
            ("trust_remote_code", config.trust_remote_code),
            ("download_dir", config.download_dir),
            ("otlp_traces_endpoint", config.otlp_traces_endpoint),
        )
        if value
    ]
    if not named or environment.get(TRUST) == "1":
        return
    roots = repositories() if known is None else known
    # Being inside a root is not enough: a repository in /tmp would contain the folders that Triton makes.
    if any((root / name / model_dir.name).resolve() == model_dir for root in roots):
        return
    where = ", ".join(map(str, roots)) or "no repository on the server's command line"
    raise ConfigError(
        f"model.json: {' and '.join(named)} may not come from a load request, and {model_dir} is not the folder of "
        f"{name!r} in the server's model repository ({where}); remove it, or set {TRUST}=1 in the server's "
        "environment if only you can load models, or if the repository is in a cloud storage"
    )


def repositories(pid: int | None = None) -> list[Path]:
    """The model repositories on the command line of the server, which is the parent of this process.

    Empty if it cannot be read or names none (a program that contains Triton as a library).
    """
    process = Path("/proc") / str(os.getppid() if pid is None else pid)
    try:
        arguments = (process / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[1:]
        folder = (process / "cwd").readlink()
    except OSError:
        return []
    found = []
    for option, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = option.partition("=")
        if len(name) >= _SHORTEST and any(full.startswith(name) for full in _OPTIONS):
            found.append((folder / (value if equals else following)).resolve())
    return found
