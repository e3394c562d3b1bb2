"""The `inflight` command.

Exit status: 0 success or stopped by the user, 1 failure, 2 wrong usage, 3 a server that was ready has died.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import inflight
from inflight.config import ConfigError, EngineConfig
from inflight.frontend.lifecycle.stub_beat import STUB_TIMEOUT
from inflight_client.chat import chat
from inflight_client.cli import generate
from inflight_client.vectors_cli import embed, rerank
from inflight_tools import admin
from inflight_tools.adapters import adapters
from inflight_tools.engine_flags import ServeCommand
from inflight_tools.gateway import (
    AllowedHosts,
    AllowedOrigin,
    ApiKey,
    ApiKeyFile,
    NoPage,
    OtlpTracesEndpoint,
    Strict,
    TrustRequestChatTemplate,
    gateway,
    read_keys,
)
from inflight_tools.kept_weights import weights
from inflight_tools.openai_beside import OpenAIAddress, gateway_beside
from inflight_tools.operator import drain, models, status
from inflight_tools.quantize.command import quantize
from inflight_tools.repository import (
    check_repository,
    default_name,
    lora_modules,
    parse_setting,
    resolve_model,
    write_entry,
)
from inflight_tools.simulator.commands import calibrate, simulate
from inflight_tools.terminal import fail, one_line_errors, stop_signals
from inflight_tools.trace.command import trace

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

__all__ = ["app"]

app = typer.Typer(
    help="Serve Hugging Face language models with continuous batching on NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LOAD_TIMEOUT_SECONDS = 900.0

_Name = Annotated[
    str | None,
    typer.Option(
        "--name", "--served-model-name", help="Model name that clients use; by default derived from the checkpoint's."
    ),
]
_MaxNumSeqs = Annotated[int | None, typer.Option(help="Maximum number of sequences in a step.")]
_MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Token budget of a step.")]
_MaxModelLen = Annotated[int | None, typer.Option(help="Maximum length of a request in tokens, prompt plus output.")]
_BlockSize = Annotated[int | None, typer.Option(help="Tokens per KV block.")]
_Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
_Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
_KvCacheMemory = Annotated[str | None, typer.Option(help='Size of the KV pool, such as "4GiB".')]
_GpuMemory = Annotated[float | None, typer.Option(help="Fraction of the GPU's memory to use.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of model.json; repeatable.")
]
_HttpPort = Annotated[int, typer.Option("--http-port", "--port", help="0 picks a free port.")]
_GrpcPort = Annotated[int, typer.Option(help="0 picks a free port.")]
_MetricsPort = Annotated[int, typer.Option(help="0 picks a free port.")]
_AdminKey = Annotated[
    str | None,
    typer.Option(envvar=admin.ENVIRONMENT, help="Key for the management endpoints; by default a random one, printed."),
]
_Unrestricted = Annotated[
    bool, typer.Option("--unrestricted", help="Let every client that reaches the ports manage models: no admin key.")
]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the server's log instead of progress, warnings and errors.")
]
_LogFile = Annotated[Path | None, typer.Option(help="Write the server's log to this file.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"inflight {inflight.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve Hugging Face language models with continuous batching on NVIDIA Triton Inference Server."""


@app.command(cls=ServeCommand)
def serve(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Hugging Face hub id, checkpoint directory or GGUF file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same as the argument MODEL.")] = None,
    name: _Name = None,
    max_num_seqs: _MaxNumSeqs = None,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    max_model_len: _MaxModelLen = None,
    block_size: _BlockSize = None,
    dtype: _Dtype = None,
    device: _Device = None,
    kv_cache_memory: _KvCacheMemory = None,
    gpu_memory_utilization: _GpuMemory = None,
    set_: _Set = None,
    http_port: _HttpPort = 8000,
    grpc_port: _GrpcPort = 8001,
    metrics_port: _MetricsPort = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model_repository: Annotated[
        Path | None, typer.Option(help="Serve this existing repository instead of --model.")
    ] = None,
    load_model: Annotated[
        list[str] | None, typer.Option(help="Load only this model of --model-repository; repeatable.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit for loading models, seconds.")] = _LOAD_TIMEOUT_SECONDS,
    stub_timeout: Annotated[
        float,
        typer.Option(min=0, help="Time without a sign of life after which a model's stub hangs, seconds; 0: no limit."),
    ] = STUB_TIMEOUT,
    admin_key: _AdminKey = None,
    unrestricted: _Unrestricted = False,
    verbose: _Verbose = False,
    log_file: _LogFile = None,
    openai: Annotated[
        bool, typer.Option("--openai/--no-openai", help="Serve OpenAI's API, too (`inflight gateway`).")
    ] = True,
    openai_port: Annotated[
        int | None, typer.Option(help="Its port; 0 picks a free one.", show_default="9000, if that is free")
    ] = None,
    openai_host: Annotated[
        str | None,
        typer.Option(help="Its address.", show_default="127.0.0.1, or that of --host with --openai-port"),
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key for OpenAI's API over HTTPS, PEM.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Its certificate chain, PEM.")] = None,
    openai_workers: Annotated[int, typer.Option(min=1, help="Processes for OpenAI's API.")] = 1,
    tool_call_parser: Annotated[str, typer.Option(help="As in `inflight gateway`.")] = "",
    reasoning_parser: Annotated[str, typer.Option(help="As in `inflight gateway`.")] = "",
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    allowed_origin: AllowedOrigin = None,
    allowed_hosts: AllowedHosts = None,
    strict: Strict = False,
    trust_request_chat_template: TrustRequestChatTemplate = False,
    no_page: NoPage = False,
    otlp_traces_endpoint: OtlpTracesEndpoint = "",
    lora_module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="LoRA adapter to serve; repeatable, or --lora-modules as in vllm."),
    ] = None,
) -> None:
    """Serve a checkpoint or a model repository until Ctrl-C.

    Examples: `inflight serve Qwen/Qwen2.5-0.5B-Instruct`, `inflight serve ./checkpoint --dtype bfloat16
    --max-model-len 8192`, `inflight serve --model-repository models --no-openai`. Then, in another terminal: `inflight
    chat`.

    Each key of model.json is also a flag, as in `vllm serve`: --kv-cache-dtype fp8, --no-enable-prefix-caching.

    Ctrl-C and SIGTERM give open requests the `drain_timeout` of their model to finish; the second one ends them.

    If the server, a model's stub process or the gateway dies, or a stub hangs, everything is ended, and one line says
    why.

    Exit status: 0 stopped by Ctrl-C or SIGTERM, 1 the server cannot start, 2 wrong usage, 3 the server was ready
    and died.
    """
    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "dtype": dtype,
        "device": device,
        "kv_cache_memory": kv_cache_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    if checkpoint is not None and model is not None:
        fail(f"{checkpoint!r} and --model {model!r} both name a model: give one of them", status=2)
    model = checkpoint if model is None else model
    with tempfile.TemporaryDirectory(prefix="inflight-repository-") as temporary:
        if model_repository is None:
            if model is None:
                fail("give a model, or --model-repository for an existing repository", status=2)
            if load_model:
                fail("--load-model requires --model-repository", status=2)
            if trust_request_chat_template:
                options["trust_request_chat_template"] = True
            options["otlp_traces_endpoint"] = otlp_traces_endpoint or None
            if lora_module:
                options["enable_lora"] = True
            with _usage_errors():
                config, modules = engine_config(model, options, set_ or []), lora_modules(lora_module or [])
                write_entry(Path(temporary), name or default_name(model), config, modules)
        else:
            traces = None if openai else otlp_traces_endpoint or None
            _reject_with_repository(
                {
                    "model": model,
                    "name": name,
                    **options,
                    "set": set_,
                    "otlp_traces_endpoint": traces,
                    "lora_module": lora_module or None,
                }
            )
            with _usage_errors():
                check_repository(model_repository)
        server = _server(
            model_repository or temporary,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            model_control_mode="explicit" if load_model else "none",
            load_models=load_model or (),
            log_file=log_file,
            temporary=[temporary],
            admin_key=_chosen_key(admin_key, unrestricted),
        )
        from inflight_tools.foreground import run_in_foreground
        from inflight_tools.server_output import ServerOutput

        beside = None
        if openai:
            ports = (http_port, grpc_port, metrics_port)
            keys = read_keys(api_key, api_key_file)
            with one_line_errors():
                beside = gateway_beside(
                    server.admin_key,
                    OpenAIAddress(openai_port, openai_host, openai_workers, ssl_keyfile, ssl_certfile, host, ports),
                    api_keys=keys,
                    tool_call_parser=tool_call_parser,
                    reasoning_parser=reasoning_parser,
                    cors_origins=tuple(allowed_origin or ()),
                    allowed_hosts=tuple(allowed_hosts or ()),
                    strict=strict,
                    trust_request_chat_template=trust_request_chat_template,
                    page=not no_page,
                    otlp_traces_endpoint=otlp_traces_endpoint,
                )
        made_key = server.admin_key if admin_key is None else None
        run_in_foreground(server, timeout, beside, stub_timeout or None, ServerOutput(verbose), made_key)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Model repository to write the entry into.")],
    model: Annotated[str, typer.Option(help="Hugging Face hub id, checkpoint directory or GGUF file.")],
    name: _Name = None,
    set_: _Set = None,
) -> None:
    """Write a model repository entry.  It is for a tritonserver that you run yourself.

    Example: `inflight init models --model Qwen/Qwen2.5-0.5B-Instruct --name qwen --set max_model_len=4096`.
    """
    with _usage_errors():
        entry = write_entry(folder, name or default_name(model), engine_config(model, {}, set_ or []))
    typer.echo(f"wrote {entry}")


@app.command()
def demo(
    http_port: _HttpPort = 8000,
    grpc_port: _GrpcPort = 8001,
    metrics_port: _MetricsPort = 8002,
    model_repository: Annotated[Path | None, typer.Option(help="Repository that contains the model `demo`.")] = None,
    exit_: Annotated[bool, typer.Option("--exit", envvar="INFLIGHT_DEMO_EXIT", help="Stop after the demo.")] = False,
    verbose: _Verbose = False,
    log_file: _LogFile = None,
    admin_key: _AdminKey = None,
    unrestricted: _Unrestricted = False,
) -> None:
    """Serve the demo model and stream to it.  Several prompts share the batch; the server keeps running.

    Examples: `inflight demo`, `inflight demo --exit`.
    """
    server = _server(
        model_repository or _demo_repository(),
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        model_control_mode="explicit",
        load_models=["demo"],
        log_file=log_file,
        admin_key=_chosen_key(admin_key, unrestricted),
    )
    from inflight_tools.demo import run_demo
    from inflight_tools.foreground import print_key, run_until_death, started
    from inflight_tools.server_output import ServerOutput

    output = ServerOutput(verbose)
    with stop_signals() as stop, one_line_errors(), started(server, _LOAD_TIMEOUT_SECONDS, stop, output) as check:
        print_key(server.admin_key if admin_key is None else None)
        run_demo(server)
        if not exit_:
            typer.echo("Press Ctrl-C to stop.")
            run_until_death(server, check)


def _chosen_key(given: str | None, unrestricted: bool) -> str | None:
    """The admin key of a new server: the given one, none, or a random one."""
    if unrestricted:
        if given is not None:
            fail(f"--unrestricted and --admin-key ({admin.ENVIRONMENT}) exclude each other", status=2)
        return None
    if given is not None:
        try:
            admin.check_key(given)
        except ValueError as error:
            fail(str(error), status=2)
        return given
    return admin.new_key()


def engine_config(model: str, options: dict[str, Any], settings: list[str]) -> EngineConfig:
    """Validate command-line options (None: not given) and `KEY=VALUE` settings.

    A value in `settings` is read as JSON if it parses as JSON, otherwise as a string.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, or no such model.
    """
    values: dict[str, Any] = {"model": resolve_model(model)}
    values.update((key, value) for key, value in options.items() if value is not None)
    values.update(map(parse_setting, settings))
    return EngineConfig.from_dict(values, source="command line")


def _reject_with_repository(options: dict[str, Any]) -> None:
    given = [key.replace("_", "-") for key, value in options.items() if value is not None]
    if given:
        fail(f"--{given[0]} cannot be combined with --model-repository; edit the model.json there", status=2)


def _server(model_repository: Path | str, **options: Any) -> TritonServer:
    """A `TritonServer` that is not started; exits if a package that the launcher needs is missing."""
    try:
        from inflight_tools.launcher import TritonServer
    except ModuleNotFoundError as error:
        fail(f"{error.name} not found; it is needed to start a server: pip install 'triton-inflight[server]'")
    return TritonServer(model_repository, **options)


def _demo_repository() -> Path:
    package = Path(__file__).resolve().parent  # the wheel contains the demo; a checkout has it at its root
    for folder in (Path.cwd(), package, package.parents[1]):
        if (folder / "model_repository" / "demo" / "config.pbtxt").is_file():
            return folder / "model_repository"
    fail("model_repository/demo not found; install the wheel again, or give --model-repository")


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        fail(str(error), status=2)


app.command()(gateway)
app.command()(generate)
app.command()(chat)
app.command()(embed)
app.command()(rerank)
app.command()(models)
app.command()(status)
app.command()(drain)
app.add_typer(adapters, name="adapters")
app.command()(quantize)
app.command()(weights)
app.command()(trace)
app.command()(calibrate)
app.command()(simulate)
