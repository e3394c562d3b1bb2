"""Keys of `model.json` as flags of `inflight serve`, in the form of `vllm serve`: `--kv-cache-dtype fp8`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from typer.core import TyperCommand

from inflight.config import EngineConfig
from inflight.vllm_options import option_names
from inflight_tools.terminal import fail

__all__ = ["ServeCommand", "as_settings"]

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization"}

# Flags of vLLM's server that are no keys, and what to do here.
_ELSEWHERE = {
    "--allowed-origins": "give each origin with --allowed-origin",
    "--chat-template-content-format": "it is told by the template; leave it out",
    "--root-path": "set it in the proxy that adds the path",
    "--ssl-ca-certs": "certificates of clients are checked by a proxy in front of the server",
    "--uvicorn-log-level": "use --verbose",
}
_MODULES = "--lora-modules"  # several values behind one flag
_WITHOUT_EFFECT = {"--enable-auto-tool-choice"}


class ServeCommand(TyperCommand):
    """A command that also takes every key of `model.json` as a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, as_settings(args, own | set(ctx.help_option_names)))


def as_settings(args: Sequence[str], own: Collection[str]) -> list[str]:
    """The arguments, with `--set KEY=VALUE` in place of each flag that is a key and not one of `own`.

    A flag that is neither is left for the command to refuse.
    """
    found: list[str] = []
    left = list(args)
    while left:
        given = left.pop(0)
        name, equals, value = given.partition("=")
        name = _SHORT.get(name, name)
        if name == _MODULES:
            found += _modules(name, value if equals else None, left)
        elif name in own or not name.startswith("--") or name == "--":
            found.append(given)
        elif name in _ELSEWHERE:
            fail(f"{name} is an option of vllm serve: {_ELSEWHERE[name]}", status=2)
        elif name not in _WITHOUT_EFFECT:
            found += _setting(name, value if equals else None, left) or [given]
    return found


def _modules(name: str, value: str | None, left: list[str]) -> list[str]:
    """`--lora-module NAME=FOLDER` for each of the values, which vLLM also takes as JSON; takes them from `left`."""
    values = [] if value is None else [value]
    while left and not left[0].startswith("-") and ("=" in left[0] or left[0].startswith("{")):
        values.append(left.pop(0))
    if not values:
        fail(f"{name} needs values such as NAME=FOLDER", status=2)
    found = []
    for one in values:
        if one.startswith("{"):
            one = _from_json(name, one)
        found += ["--lora-module", one]
    return found


def _from_json(flag: str, text: str) -> str:
    """`NAME=FOLDER`; the name ends at the first "="."""
    try:
        given = json.loads(text)
        name, path = str(given["name"]), str(given["path"])
    except (ValueError, KeyError, TypeError, RecursionError):
        fail(f'{flag} {text!r}: expected NAME=FOLDER, or {{"name": "...", "path": "..."}}', status=2)
    if "=" in name:
        fail(f"{flag} {text!r}: a name contains no '='; choose another, or write it in multi_lora.json", status=2)
    return f"{name}={path}"


def _setting(name: str, value: str | None, left: list[str]) -> list[str]:
    """`--set KEY=VALUE`, with a value taken from `left` if it was not given; [] if `name` is no key."""
    keys = _keys()
    key = name.removeprefix("--").replace("-", "_")
    if value is None and key not in keys and keys.get(key.removeprefix("no_")) is True:
        return ["--set", f"{key.removeprefix('no_')}=false"]
    if key not in keys:
        return []
    if value is None:
        if keys[key] and not (left and left[0] in ("true", "false", "auto")):
            value = "true"
        elif not left:
            fail(f"{name} needs a value", status=2)
        else:
            value = left.pop(0)
    return ["--set", f"{key}={value}"]


def _keys() -> dict[str, bool]:
    """Each key; True: it is on or off."""
    own = {field.name: "bool" in str(field.type) for field in msgspec.structs.fields(EngineConfig)}
    return {**option_names(), **own}
