"""`headrace agent stop|resume`: words on the control lane, which no backlog delays."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from msgspec import Raw

from headrace.cli.agent_common import AgentName, agent_name, refusals_told
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.mail import OPERATOR, ControlBody, Mail

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

Wait = Annotated[
    float, typer.Option("--wait", min=0, max=3_600, help="Seconds to wait for the agent's word that it did.")
]
Why = Annotated[str, typer.Option("--why", help="The reason, for its log.")]


def stop(
    agent: AgentName,
    *,
    wait: Wait = 10.0,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0,
            max=3_600,
            help="Seconds for what it is handling [default: its own].",
            show_default=False,
        ),
    ] = None,
    why: Why = "",
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Stop an agent: it takes no more work, over restarts too, until `headrace agent resume`. Its mailbox still fills.

    Exit code 0: it has stopped, or will when it starts next; 4: there is no such agent; 8: no word from it in time.
    """
    _control(agent, "stop", ControlBody(grace_s=grace, why=why[:2_048]), wait, folder, url, json=json)


def resume(
    agent: AgentName,
    *,
    wait: Wait = 10.0,
    why: Why = "",
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Let a stopped agent take work again. Exit codes as those of `headrace agent stop`."""
    _control(agent, "resume", ControlBody(why=why[:2_048]), wait, folder, url, json=json)


def _control(
    agent: str,
    kind: Literal["stop", "resume"],
    body: ControlBody,
    wait_s: float,
    folder: Path | None,
    url: str | None,
    *,
    json: bool,
) -> None:
    name = agent_name(agent)
    with refusals_told(json=json):
        found = run_on_mesh(folder, url, lambda mesh: _send(mesh, name, kind, body, wait_s))
    done = found["stopped"] is (kind == "stop")
    if json:
        print_json(found)
    elif done:
        print_line(f"{name} {'has stopped' if kind == 'stop' else 'takes work'}")
    elif found["running"]:
        say(f"{name} did not say yet that it did: it will, the message is stored ({found['id']})")
    else:
        print_line(f"{name} does not run: it will {kind} when it starts")
    if not done and found["running"]:
        raise typer.Exit(Exit.IN_PROGRESS)


async def _send(
    mesh: Mesh, agent: str, kind: Literal["stop", "resume"], body: ControlBody, wait_s: float
) -> dict[str, Any]:
    from headrace.contracts.errors import NotFound
    from headrace.mesh.directory import unknown_agent, who_is_there
    from headrace.mesh.mail import new_id, now_us, send_mail

    mail = Mail(
        id=new_id(),
        to=agent,
        sender=OPERATOR,
        kind=kind,
        lane="control",
        body=Raw(msgspec.json.encode(body)),
        created_us=now_us(),
    )
    try:
        await send_mail(mesh, mail)
    except NotFound:
        raise await unknown_agent(mesh, agent) from None
    running = agent in await who_is_there(mesh)
    until = time.monotonic() + (wait_s if running else 0.0)
    stopped = await _stopped(mesh, agent)
    while stopped is not (kind == "stop") and time.monotonic() < until:
        await asyncio.sleep(0.05)
        stopped = await _stopped(mesh, agent)
    return {"id": mail.id, "agent": agent, "running": running, "stopped": bool(stopped)}


async def _stopped(mesh: Mesh, agent: str) -> bool | None:
    """What the agent's committed state says; None if it has none yet."""
    from headrace.contracts import codec
    from headrace.mesh.jsapi import last_message

    stored = await last_message(mesh, mesh.topology.agents, mesh.subjects.agent_state(agent))
    if stored is None:
        return None
    return codec.AGENT_STATE.decode(stored.data, stored.headers).stopped
