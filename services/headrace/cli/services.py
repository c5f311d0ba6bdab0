"""The services, each a command of its own: what `headrace up` starts, and what a cluster's unit files run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headrace.cli import setting_flags
from headrace.cli.options import Dir
from headrace.cli.target import find_settings

_SERVICES = {
    "worker": ("headrace.inference_worker.service", "WorkerService", "worker"),
    "completion": ("headrace.completion.service", "CompletionService", "completion"),
    "gateway": ("headrace.gateway.service", "GatewayService", "gateway"),
}

_FORGE_FLAGS: Final[dict[str, tuple[str, object]]] = {
    "batching": (
        "worker_batching",
        Annotated[
            str | None,
            typer.Option(
                "--batching",
                help="--functions: rows:N or tokens:BUDGET [default: as configured, as a function says, else rows:64].",
                show_default=False,
            ),
        ],
    ),
    "max_wait_ms": (
        "max_wait_ms",
        Annotated[
            int | None,
            typer.Option(
                "--max-wait-ms",
                min=0,
                help="--functions: how long a batch waits to fill [default: 50].",
                show_default=False,
            ),
        ],
    ),
    "processes": (
        "processes",
        Annotated[
            int | None,
            typer.Option(
                "--processes",
                min=0,
                help="--functions: processes of each; 0: one for each core [default: as a function says, else 1].",
                show_default=False,
            ),
        ],
    ),
}
"""Flags of the worker by name: the setting of `[forge]` that each gives."""


def worker_command() -> Callable[..., None]:
    """`headrace worker`."""
    return _command(
        "worker",
        "Run an inference worker: pull tasks of one function, run them in an engine, publish the results.\n\n"
        "With --functions it serves functions over rows instead, each with a queue, batches and processes of its own: "
        "every @function of a module (the current folder is on the path), or single ones.\n\n"
        "SIGTERM drains it: it starts nothing new, and finishes or gives back what it holds.",
        forge=_FORGE_FLAGS,
    )


def completion_command() -> Callable[..., None]:
    """`headrace completion`."""
    return _command(
        "completion",
        "Run the completion service: land results in DuckDB, keep the accounts of jobs, answer questions about them.",
    )


def gateway_command() -> Callable[..., None]:
    """`headrace gateway`."""
    return _command("gateway", "Run the gateway: the front door that takes work in over `nats request`.")


def _command(
    name: str, text: str, *, forge: Mapping[str, tuple[str, object]] | None = None
) -> Callable[..., None]:
    """`forge`: settings of that section which the command takes as well, for the functions that it serves."""
    section = _SERVICES[name][2]

    def command(folder: Path | None = None, **given: Any) -> None:
        own = {f"forge.{setting}": given.pop(flag) for flag, (setting, _) in (forge or {}).items()}
        flags = setting_flags.flags_of(section, given) | {k: v for k, v in own.items() if v is not None}
        raise typer.Exit(_run(name, folder, flags))

    dir_parameter = inspect.Parameter("folder", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Dir)
    command.__signature__ = inspect.Signature(
        [dir_parameter, *setting_flags.parameters(section), *_forge_parameters(forge or {})]
    )  # pyright: ignore[reportFunctionMemberAccess]
    command.__name__ = name
    command.__doc__ = text
    return command


def _forge_parameters(flags: Mapping[str, tuple[str, object]]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f, kind, default=None, annotation=option) for f, (_, option) in flags.items()]


def _run(name: str, folder: Path | None, flags: dict[str, object]) -> int:
    url = flags.pop("url", None)
    settings = find_settings(folder, str(url) if url else None, flags)
    from headrace.mesh.service import run_service

    if name == "worker" and settings.worker.functions:
        from headrace.forge.plans import flags_first
        from headrace.inference_worker.functions import FunctionsService

        return int(run_service(FunctionsService, flags_first(settings, flags)))
    module, class_name, _ = _SERVICES[name]
    return int(run_service(getattr(import_module(module), class_name), settings))
