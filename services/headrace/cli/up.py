"""`headrace up`: a whole mesh on this machine, in the foreground, in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Dir
from headrace.contracts.errors import InvalidInput

ENGINES = ("llamacpp", "vllm", "sim", "echo")

Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="llamacpp (any GGUF, small demo weights without --model), vllm, sim (no model) or echo "
        "[default: as configured, else as last time in this folder, else llamacpp].",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="A GGUF file (llamacpp) or a model folder (vllm).", show_default=False),
]
Workers = Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes.")]


def up(
    folder: Dir = None,
    engine: Engine = None,
    model: Model = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="File of settings [default: headrace.toml in --dir, else here].",
            show_default=False,
        ),
    ] = None,
    workers: Workers = 1,
    gateways: Annotated[int, typer.Option("--gateways", min=1, max=16, help="Gateway processes.")] = 1,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1,
            max=65_535,
            help="Port of the broker [default: this folder's own, picked free once].",
            show_default=False,
        ),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            "--durability",
            help="safe: acknowledged means on disk. relaxed: in the page cache [default: safe].",
            show_default=False,
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--function", help="Function that the workers host [default: generate].", show_default=False
        ),
    ] = None,
    functions: Annotated[
        str | None,
        typer.Option(
            "--functions",
            metavar="MODULES",
            help="Functions over rows that one more worker serves: pkg.mod, pkg.mod:name, embed; several with commas.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            min=0,
            help="Items that run at once in a worker; 0: the engine decides.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=0,
            help="Longest prompt + answer in tokens; 0: the engine decides.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=0, help="CPU threads of an engine; 0: the engine decides.", show_default=False
        ),
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option", metavar="NAME=VALUE", help="A setting of the engine itself; may be repeated."
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0,
            help="Seconds that a stop waits for running work [default: 20].",
            show_default=False,
        ),
    ] = None,
    ready_timeout: Annotated[
        float,
        typer.Option(
            "--ready-timeout", min=1, help="Seconds that a service may take to be ready at the first start."
        ),
    ] = 300.0,
) -> None:
    """Run a mesh on this machine: broker, completion, gateway and workers, each in its own process.

    Stays in the foreground and restarts what dies. The line `ready nats://127.0.0.1:PORT` on standard output
    says that work can be submitted. Ctrl-C or SIGTERM drains (workers, gateways, completion, broker); a second
    one ends everything at once: nothing that was acknowledged is lost by that either. Everything lies in one
    folder; settings in its headrace.toml apply.
    """
    from headrace.cli.supervisor.foreground import UpOptions, run_foreground
    from headrace.mesh.settings import CONFIG_ENV

    if config is not None:
        os.environ[CONFIG_ENV] = str(config.absolute())  # for the services as well

    options = UpOptions(
        folder=folder,
        engine=known_engine(engine),
        model=str(Path(model).expanduser()) if model else None,
        workers=workers,
        gateways=gateways,
        port=port,
        durability=durability,
        function=function,
        slots=slots,
        context=context,
        threads=threads,
        engine_options=engine_option or [],
        grace_s=grace,
        ready_timeout_s=ready_timeout,
        functions=functions or "",
    )
    raise typer.Exit(run_foreground(options))


def known_engine(engine: str | None) -> str | None:
    """`engine`, or `InvalidInput` naming those that there are."""
    if engine is not None and engine not in ENGINES:
        raise InvalidInput(
            f"engine {engine[:80]!r} is unknown: use one of {', '.join(ENGINES)}", field="engine"
        )
    return engine
