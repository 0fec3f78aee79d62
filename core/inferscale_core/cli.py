"""The ``inferscale`` command."""

import ipaddress
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

try:
    import typer
except ImportError as error:
    raise SystemExit(
        "the inferscale command needs an extra: pip install 'inferscale-adapters[cpu]' "
        f"(or [cuda12], [cuda13]) [{error}]"
    ) from error

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Serve a model whose memory is injected as KV instead of prefilled.",
)
models_app = typer.Typer(no_args_is_help=True, help="Small models that come by name.")
app.add_typer(models_app, name="models")

DEFAULT_PORT = 8000

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _fail(message: str) -> typer.Exit:
    typer.echo(f"inferscale: {message}", err=True)
    return typer.Exit(2)


def _version(shown: bool) -> None:
    if shown:
        try:
            typer.echo(version("inferscale-adapters"))
        except PackageNotFoundError:
            typer.echo("unknown (not installed as a package)")
        raise typer.Exit


@app.callback()
def _main(
    shown: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that binds to ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _value_of(option: str, args: list[str]) -> str | None:
    """Value of an option in raw arguments, ``--option value`` or ``--option=value``; the last."""
    value = None
    for i, arg in enumerate(args):
        if arg == option and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"{option}="):
            value = arg.split("=", 1)[1]
    return value


def _check_port(host: str, port: str | None, uds: bool) -> None:
    """Fail at once, not after the model is loaded; what is no number is vLLM's to refuse."""
    if uds or (port is not None and not port.isdigit()):
        return
    number = int(port or DEFAULT_PORT)
    if not 0 < number < 1 << 16:
        raise _fail(f"--port {number} is no port; expected 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), number))
        except OSError as error:
            raise _fail(
                f"cannot listen on {host} port {number}: {error.strerror}; end what listens "
                "there, or serve on another --port"
            ) from error


@app.command(context_settings=PASS_ON)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A directory, a hub id or a known name.")],
    store: Annotated[str | None, typer.Option(help="Database of the facts.")] = None,
    core_config: Annotated[
        str | None, typer.Option(help="Fields of the core's configuration, JSON.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow a --host that others reach.")
    ] = False,
) -> None:
    """Serve MODEL with vLLM's API server and InferScale's plugins.

    Every other option is vLLM's and wins over InferScale's own: --port 9000, --max-model-len
    4096, --tensor-parallel-size 2 ... Listens on 127.0.0.1 unless --host is given.
    """
    from inferscale_core import models
    from inferscale_core.client.errors import InferScaleError
    from inferscale_core.client.launch import (
        check_model,
        interpreter,
        named_options,
        probe,
        server_argv,
        server_env,
    )
    from inferscale_core.config import CoreConfig

    args = list(context.args)
    names = named_options(args)
    options: dict[str, Any] = {}
    host = _value_of("--host", args)
    if host is None and "uds" not in names:
        options["host"] = "127.0.0.1"
    elif host is not None and not is_loopback(host) and not insecure:
        raise _fail(
            f"--host {host} lets other machines in, and this version has no keys: whoever "
            "reaches the port reads every fact. Serve on 127.0.0.1 behind a proxy that checks "
            "who calls, or add --insecure"
        )
    _check_port(host or "127.0.0.1", _value_of("--port", args), "uds" in names)
    try:
        config = CoreConfig.from_json(core_config, **({} if store is None else {"store": store}))
    except ValueError as error:
        raise _fail(
            f"--core-config is not valid: {error}\nIts fields: {', '.join(CoreConfig.model_fields)}"
        ) from error
    try:
        engine = probe(interpreter(None))
        path = models.resolve(model, python=engine.python)
        check_model(path)
    except InferScaleError as error:
        raise _fail(str(error)) from error
    if path != model and "served-model-name" not in names:
        options["served_model_name"] = [model, path]
    argv = server_argv(engine, path, config, options, args)
    sys.stdout.flush()
    os.execve(argv[0], argv, {**os.environ, **server_env(engine, argv)})


@models_app.command("list")
def models_list() -> None:
    """The models that `inferscale models get` fetches, and where they are."""
    from inferscale_core import models

    for model in models.MODELS.values():
        path = models.directory_of(model)
        where = str(path) if path.exists() else "not fetched"
        typer.echo(f"{model.name}\t{model.summary}\t{where}")


@models_app.command("get")
def models_get(name: Annotated[str, typer.Argument(help="As `models list` shows it.")]) -> None:
    """Fetch a model; prints its directory."""
    from inferscale_core import models
    from inferscale_core.client.errors import InferScaleError

    try:
        typer.echo(str(models.get(name)))
    except InferScaleError as error:
        raise _fail(str(error)) from error


@app.command()
def status(
    base_url: Annotated[str | None, typer.Option(help="Ask the core that is served there.")] = None,
) -> None:
    """The private cores of this user, or the facts and arena of a served core."""
    from inferscale_core.client.client import Client
    from inferscale_core.client.errors import InferScaleError
    from inferscale_core.client.locks import held_leases, is_free
    from inferscale_core.client.rundir import CoreDir
    from inferscale_core.config import home

    if base_url is not None:
        try:
            with Client(base_url, timeout=30) as client:
                typer.echo(client.status().model_dump_json(indent=2))
        except InferScaleError as error:
            raise _fail(str(error)) from error
        return
    shown = 0
    for path in sorted((home() / "cores").glob("*")):
        core = CoreDir(path)
        report = core.read_status()
        if report is None or is_free(core.supervisor_lock):
            continue
        shown += 1
        users = held_leases(core.leases)
        typer.echo(
            f"{path.name[:12]}\t{report.state}\t{users} {'user' if users == 1 else 'users'}\t"
            f"pid {report.server_pid}\t{report.model}\t{report.socket}"
        )
    if not shown:
        typer.echo("no private core runs")


@app.command(context_settings={**PASS_ON, "help_option_names": []})
def demo(context: typer.Context) -> None:
    """Answer questions from stored facts, as prompt text and injected."""
    from inferscale_core.bench.demo import demo as run_demo

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(run_demo)
    command(context.args, prog_name="inferscale demo")


@app.command(context_settings={**PASS_ON, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure: time to first token, throughput, fidelity ..."""
    from inferscale_core.bench.cli import bench_app

    bench_app(context.args, prog_name="inferscale bench")


def main() -> None:
    """Entry point of the ``inferscale`` command."""
    app()


if __name__ == "__main__":
    main()
