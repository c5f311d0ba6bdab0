"""`headrace agent send|ask|answer`: mail from a command line, and answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.cli.agent_common import (
    AgentName,
    agent_name,
    checked,
    read_json,
    read_text,
    refusals_told,
)
from headrace.cli.api import ask as ask_service
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.agents import AgentAnswer, AnswerRequest, prompt_body
from headrace.contracts.mail import OPERATOR, Kind, Mail
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

POLL_S = 4.0
MARGIN_S = 8.0

Wait = Annotated[float, typer.Option("--wait", min=0, max=86_400, help="Seconds to wait for the answer.")]


def send(
    to: AgentName,
    *,
    kind: Annotated[str, typer.Option("--kind", help="Kind of the message: which handler takes it.")],
    body: Annotated[
        str, typer.Option("--body", help="The message: JSON, @FILE, or - for standard input.")
    ] = "null",
    sender: Annotated[str, typer.Option("--from", help="Who sends.")] = OPERATOR,
    id_: Annotated[
        str | None,
        typer.Option(
            "--id", help="Id of the message: sent again under it, it is handled once.", show_default=False
        ),
    ] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", help="What it belongs to.", show_default=False)
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            min=0.001,
            max=31_536_000,
            help="Seconds after which nobody wants it handled.",
            show_default=False,
        ),
    ] = None,
    unknown_ok: Annotated[
        bool, typer.Option("--unknown-ok", help="Store it also for an agent that was never started.")
    ] = False,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Send a message to an agent. It is stored when this says so, whether or not the agent runs.

    Exit code 4: there is no such agent; 5: its mailbox is full, or the message too large.
    """
    from headrace.mesh.mail import check_mail_size, new_id, now_us, send_mail

    now = now_us()
    mail = Mail(
        id=new_id() if id_ is None else check_token("id", id_),
        to=agent_name(to),
        sender=check_token("sender", sender),
        kind=checked("kind", kind, Kind),
        body=read_json(body),
        conversation=None if conversation is None else check_token("conversation", conversation),
        deadline_us=None if deadline is None else now + int(deadline * 1e6),
        created_us=now,
    )

    async def work(mesh: Mesh) -> None:
        check_mail_size(mesh, mail)
        await send_mail(mesh, mail, unknown_ok=unknown_ok)

    with refusals_told(json=json):
        run_on_mesh(folder, url, work)
    if json:
        print_json({"id": mail.id, "stored": True})
    else:
        print_line(f"stored {mail.id} for {mail.to}")


def ask(
    to: AgentName,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|JSON",
            help="Text, or a JSON object; @FILE, or - for standard input.",
            show_default=False,
        ),
    ],
    *,
    wait: Wait = 60.0,
    kind: Annotated[str, typer.Option("--kind", help="Kind of the message.")] = "prompt",
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            help="Id of the request: asked again under it, it is the same request.",
            show_default=False,
        ),
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Ask an agent and wait for its answer; what comes later is fetched by `headrace agent answer`.

    Exit code 4: there is no such agent; 5: refused, by a full mailbox or by the agent; 7: the request's
    id was used for another one; 8: no answer yet.
    """
    from headrace.mesh.mail import new_id

    data = read_text(prompt)
    prompt_body(data)
    name = agent_name(to)
    until = time.monotonic() + wait
    headers = {
        "Headrace-Request": new_id() if request is None else check_token("request", request),
        "Headrace-Kind": checked("kind", kind, Kind),
        "Headrace-Wait": f"{min(wait, POLL_S):g}",
    }

    async def work(mesh: Mesh) -> AgentAnswer:
        asked = await ask_service(
            mesh, f"agents.prompt.{name}", data, AgentAnswer, timeout_s=POLL_S + MARGIN_S, headers=headers
        )
        return await _wait_for(mesh, asked, until)

    with refusals_told(json=json):
        found = run_on_mesh(folder, url, work)
    _show(found, json=json)


def answer(
    request: Annotated[str, typer.Argument(help="Id of the request.", show_default=False)],
    *,
    wait: Wait = 0.0,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Fetch the answer to an earlier request; answers are kept for a day.

    Exit code 4: there was no such request; 5: the agent refused; 8: no answer yet.
    """
    wanted = AnswerRequest(request=check_token("request", request))
    until = time.monotonic() + wait

    async def work(mesh: Mesh) -> AgentAnswer:
        found = await ask_service(mesh, "agents.answer", wanted, AgentAnswer)
        return await _wait_for(mesh, found, until)

    with refusals_told(json=json):
        found = run_on_mesh(folder, url, work)
    _show(found, json=json)


async def _wait_for(mesh: Mesh, found: AgentAnswer, until: float) -> AgentAnswer:
    while found.state == "accepted" and (left := until - time.monotonic()) > 0:
        request = AnswerRequest(request=found.request, wait_s=min(POLL_S, left))
        found = await ask_service(mesh, "agents.answer", request, AgentAnswer, timeout_s=POLL_S + MARGIN_S)
    return found


def _show(found: AgentAnswer, *, json: bool) -> None:
    if json:
        print_json(found)
    elif found.state == "answered":
        value = msgspec.json.decode(found.answer)
        print_line(value if isinstance(value, str) else bytes(found.answer).decode())
    else:
        say(f"no answer yet; later: headrace agent answer {found.request}")
    if found.state == "accepted":
        raise typer.Exit(Exit.IN_PROGRESS)
