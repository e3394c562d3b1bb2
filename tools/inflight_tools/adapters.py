"""`inflight adapters list`, `load` and `unload`.  Exit status: as of `inflight models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from inflight_client.client import Client
from inflight_client.command_client import sole_model
from inflight_client.endpoint import find_endpoint
from inflight_client.local_servers import key_of
from inflight_tools.operator import AdminKey, Json, Model, Url, failures
from inflight_tools.terminal import fail

__all__ = ["adapters"]

_LOAD_SECONDS = 300.0

adapters = typer.Typer(
    help="List, load and unload LoRA adapters of a running server.", no_args_is_help=True, rich_markup_mode=None
)
_Name = Annotated[str, typer.Argument(help="Name that requests choose the adapter by.")]


@adapters.command("list")
def list_adapters(url: Url = "127.0.0.1:8001", model: Model = None, json_: Json = False) -> None:
    """List the adapters of a model, each with the id of its content.

    Examples: `inflight adapters list`, `inflight adapters list --json | jq -r keys[]`.
    """
    with failures():
        protocol, url = find_endpoint(url)
        with Client(url, protocol=protocol, model=model or sole_model(url, protocol, key_of(url))) as client:
            found = client.model_info().get("adapters")
            name = client.model
    if found is None:
        fail(f"model {name!r} serves no adapters; set enable_lora in its model.json")
    typer.echo(json.dumps(found) if json_ else "\n".join(f"{one}  {id}" for one, id in found.items()) or "no adapters")


@adapters.command()
def load(
    name: _Name,
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Folder on the server's machine, in one of the model's lora_allowed_paths.",
            show_default="the one of multi_lora.json",
        ),
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Replace an adapter of this name; open requests keep the old one.")
    ] = False,
    url: Url = "127.0.0.1:8001",
    model: Model = None,
    json_: Json = False,
    admin_key: AdminKey = None,
) -> None:
    """Load an adapter while the model serves.

    Examples: `inflight adapters load doll /loras/doll`, `inflight adapters load doll --reload`.
    """
    parameters: dict[str, str | bool] = {"lora_name": name, "load_inplace": reload}
    if path is not None:
        parameters["lora_path"] = str(path if path.is_absolute() else path.resolve())
    answer = _ask(url, model, "load_adapter", parameters, admin_key)
    found = json.loads(answer)
    typer.echo(
        answer
        if json_
        else f"loaded {found['lora_name']} in {found['seconds']:.1f} s: id {found['id']}, rank {found['rank']}, "
        f"lora_id {found['lora_id']}, {found['instances']} instances"
    )


@adapters.command()
def unload(
    name: _Name, url: Url = "127.0.0.1:8001", model: Model = None, json_: Json = False, admin_key: AdminKey = None
) -> None:
    """Take an adapter's name away; open requests keep the adapter.

    Example: `inflight adapters unload doll`.
    """
    answer = _ask(url, model, "unload_adapter", {"lora_name": name}, admin_key)
    typer.echo(answer if json_ else f"unloaded {json.loads(answer)['lora_name']}")


def _ask(url: str, model: str | None, control: str, parameters: dict[str, str | bool], admin_key: str | None) -> str:
    with failures():
        protocol, url = find_endpoint(url)
        key = admin_key or key_of(url)
        asked = model or sole_model(url, protocol, key)
        with Client(url, protocol=protocol) as client:
            return client.control(control, asked, _LOAD_SECONDS, key, parameters)
