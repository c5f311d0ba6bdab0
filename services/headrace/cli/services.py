"""The services, each a command of its own: what `headrace up` starts, and what a cluster's unit files run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from headrace.cli import setting_flags
from headrace.cli.options import Dir
from headrace.cli.target import find_settings

_SERVICES = {
    "worker": ("headrace.inference_worker.service", "WorkerService", "worker"),
    "completion": ("headrace.completion.service", "CompletionService", "completion"),
    "gateway": ("headrace.gateway.service", "GatewayService", "gateway"),
}


def worker_command() -> Callable[..., None]:
    """`headrace worker`."""
    return _command(
        "worker",
        "Run an inference worker: pull tasks of one function, run them in an engine, publish the results.\n\n"
        "SIGTERM drains it: it starts nothing new, and finishes or gives back what it holds.",
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


def _command(name: str, text: str) -> Callable[..., None]:
    section = _SERVICES[name][2]

    def command(folder: Path | None = None, **given: Any) -> None:
        raise typer.Exit(_run(name, folder, setting_flags.flags_of(section, given)))

    dir_parameter = inspect.Parameter("folder", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Dir)
    command.__signature__ = inspect.Signature([dir_parameter, *setting_flags.parameters(section)])  # pyright: ignore[reportFunctionMemberAccess]
    command.__name__ = name
    command.__doc__ = text
    return command


def _run(name: str, folder: Path | None, flags: dict[str, object]) -> int:
    url = flags.pop("url", None)
    settings = find_settings(folder, str(url) if url else None, flags)
    from headrace.mesh.service import run_service

    module, class_name, _ = _SERVICES[name]
    return int(run_service(getattr(import_module(module), class_name), settings))
