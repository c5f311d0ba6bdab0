"""`headrace agent run`: a process that runs agents, as a service like the others."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import setting_flags
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir
from headrace.cli.output import say
from headrace.cli.target import find_settings
from headrace.contracts.errors import HeadraceError
from headrace.mesh.settings import AgentSettings

if TYPE_CHECKING:
    from headrace.agent import Agent
    from headrace.mesh.service import Service
    from headrace.mesh.settings import Settings

Agents = Annotated[
    list[str],
    typer.Argument(
        metavar="PACKAGE.MODULE:AGENT",
        help="Where each agent is: a module that can be imported from here, and its name there.",
        show_default=False,
    ),
]


def run_command() -> Callable[..., None]:
    """`headrace agent run`, with the settings of agents as flags."""

    def run(agents: Agents, folder: Dir = None, **given: Any) -> None:
        raise typer.Exit(_run(agents, folder, _flags(given)))

    first = inspect.Parameter("agents", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Agents)
    where = inspect.Parameter("folder", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Dir)
    run.__signature__ = inspect.Signature([first, where, *_parameters()])  # pyright: ignore[reportFunctionMemberAccess]
    run.__doc__ = (
        "Run one agent or several in this process: take their mail, one message at a time each.\n\n"
        "Modules are looked for in the current folder, too. SIGTERM drains: what is being handled is finished. "
        "Exit code 0 drained, 1 a part died or another process took the agents over, 2 it could not start."
    )
    return run


def _parameters() -> list[inspect.Parameter]:
    """The flags: where a setting of agents has the name of a general one, it is the agents'."""
    return list({p.name: p for p in setting_flags.parameters("agent")}.values())


def _flags(given: dict[str, Any]) -> dict[str, object]:
    own = AgentSettings.__struct_fields__
    return {f"agent.{name}" if name in own else name: value or None for name, value in given.items()}


def _run(names: list[str], folder: Path | None, flags: dict[str, object]) -> int:
    url = flags.pop("url", None)
    settings = find_settings(folder, str(url) if url else None, flags)
    from headrace.agent.service import AgentService
    from headrace.mesh.service import run_service

    agents = [_load(name) for name in names]

    def make(settings: Settings) -> Service:
        return AgentService(settings, agents)

    make.name = "agent"  # pyright: ignore[reportFunctionMemberAccess]  (the name under which it logs)
    return int(run_service(make, settings))


def _load(name: str) -> Agent:
    """The agent; what its module raises is told whole, since it is its author who reads it."""
    from headrace.agent import load_agent

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return load_agent(name)
    except HeadraceError as e:
        say(f"error: {e}")
    except Exception:  # noqa: BLE001  (a module may raise anything)
        say(f"error: {name} cannot be imported:\n{traceback.format_exc(limit=-8)}")
    raise typer.Exit(Exit.INVALID)
