"""`headrace agent list|inbox|history`: which agents there are, what waits for them, and what they did."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.agent_common import AgentName, agent_name, refusals_told
from headrace.cli.api import ask
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import clock_text, print_json, print_table, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.capture import run_token
from headrace.contracts.errors import NotFound

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

LANES = ("work", "control", "reply")
COLUMNS = (
    "recorded_at",
    "agent",
    "kind",
    "name",
    "peer",
    "hop",
    "message",
    "run",
    "life",
    "seq",
    "data",
    "trace_id",
)


def list_(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """List the agents that there are: what each does and takes, whether it runs, and how much waits for it."""
    found = run_on_mesh(folder, url, _list)
    if json:
        print_json(found)
        return
    rows = [
        (a["name"], _state(a), a["work"], a["control"], ", ".join(a["kinds"]), _plain(a["description"]))
        for a in found
    ]
    print_table(("agent", "state", "work", "control", "takes", "what it does"), rows)


def inbox(agent: AgentName, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Show what waits in an agent's mailbox: messages of each lane, and the age of the oldest.

    What is being handled counts until it is done. Exit code 4: there is no such agent.
    """
    name = agent_name(agent)
    with refusals_told(json=json):
        found = run_on_mesh(folder, url, lambda mesh: _inbox(mesh, name))
    if json:
        print_json({name: found[name] for name in ("work", "control", "oldest_s")})
    else:
        oldest = clock_text(found["oldest_s"]) if found["oldest_s"] else "-"
        print_table(("lane", "waiting"), [(lane, found[lane]) for lane in LANES])
        say(f"oldest: {oldest}")


def history(
    what: Annotated[
        str,
        typer.Argument(
            metavar="AGENT|RUN", help="An agent, or a run: the id of a conversation.", show_default=False
        ),
    ],
    *,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, help="How many at most: the latest ones.")
    ] = 1_000,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show what an agent did, or what all agents did in one run, in order.

    Order is that of the agents' clocks; of one agent, that of its own doing. Records land within a second or so.
    """
    # Nothing of it is free text: a token, a number.
    token = run_token(what)
    sql = (
        f"SELECT {', '.join(COLUMNS)} FROM (SELECT * FROM capture WHERE agent = '{token}' OR run = '{token}' "  # noqa: S608
        f"ORDER BY recorded_at DESC, agent DESC, life DESC, seq DESC LIMIT {limit}) "
        "ORDER BY recorded_at, agent, life, seq"
    )

    async def work(mesh: Mesh) -> QueryReply:
        return await ask(mesh, "query", QueryRequest(sql=sql, max_rows=limit), QueryReply, timeout_s=20.0)

    found = run_on_mesh(folder, url, work)
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    if json:
        print_json(rows)
    else:
        shown = ("recorded_at", "agent", "kind", "name", "peer", "hop", "data")
        print_table(shown, [[row[c] for c in shown] for row in rows])
    if found.truncated:
        say("an answer does not hold more: ask for less (--limit)")


async def _list(mesh: Mesh) -> list[dict[str, Any]]:
    from headrace.mesh.directory import list_cards, who_is_there

    running = await who_is_there(mesh)
    waiting = await _waiting(mesh, f"{mesh.subjects.prefix}.mail.>")
    found: list[dict[str, Any]] = []
    for card in await list_cards(mesh):
        here = running.get(card.name)
        found.append(
            {
                "name": card.name,
                "description": card.description,
                "version": card.version,
                "kinds": sorted(card.mailbox.kinds) if card.mailbox is not None else [],
                "running": here is not None,
                "stopped": here.stopped if here is not None else None,
                "host": here.host if here is not None else None,
                "pid": here.pid if here is not None else None,
                "work": waiting[card.name, "work"],
                "control": waiting[card.name, "control"],
            }
        )
    return found


async def _inbox(mesh: Mesh, agent: str) -> dict[str, Any]:
    from headrace.mesh.directory import find_card, unknown_agent
    from headrace.mesh.mail import Post

    waiting = await _waiting(mesh, mesh.subjects.mail_of(agent))
    if not waiting and await find_card(mesh, agent) is None:
        try:
            await Post(mesh).check_known(agent, "work")
        except NotFound:
            raise await unknown_agent(mesh, agent) from None
    ages = [await _age_s(mesh, mesh.subjects.mail_lane(agent, lane)) for lane in ("work", "control")]
    return {lane: waiting[agent, lane] for lane in LANES} | {"oldest_s": round(max(ages), 3)}


async def _waiting(mesh: Mesh, filter_: str) -> Counter[tuple[str, str]]:
    """How many messages wait, by agent and lane."""
    from headrace.mesh.jsapi import stream_info

    info = await stream_info(mesh, mesh.topology.mail, subjects_filter=filter_)
    found: Counter[tuple[str, str]] = Counter()
    for subject, count in info["state"]["subjects"].items():
        _, _, agent, lane, *_ = subject.split(".")
        found[agent, lane] += count
    return found


async def _age_s(mesh: Mesh, filter_: str) -> float:
    """Age of the oldest message that matches, 0 if there is none."""
    from headrace.mesh.jsapi import NO_MESSAGE, JetStreamError, call

    try:
        found = await call(mesh, f"STREAM.MSG.GET.{mesh.topology.mail}", {"seq": 1, "next_by_subj": filter_})
    except JetStreamError as e:
        if e.err_code == NO_MESSAGE:
            return 0.0
        raise
    stored = datetime.fromisoformat(str(found["message"]["time"]))
    return max(0.0, time.time() - stored.timestamp())


def _plain(text: str) -> str:
    """A stranger's text for a terminal: on one line, without what would speak to it."""
    return "".join(c if c.isprintable() else " " for c in text)


def _state(agent: dict[str, Any]) -> str:
    if not agent["running"]:
        return "away"
    return "stopped" if agent["stopped"] else "runs"
