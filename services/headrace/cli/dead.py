"""`headrace dead list|show|redrive`: what was given up, and another chance for it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.api import ask
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line, print_table, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import DeadEntry, DeadReply, DeadRequest, RedriveReply, RedriveRequest
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

MAX_ID = 256
PAGE = 1_000

app = typer.Typer(
    help="What was given up: items whose tries are exhausted, and letters (messages that no consumer could take).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

OfJob = Annotated[
    str | None, typer.Option("--job", help="Only what is dead of this job.", show_default=False)
]
Id = Annotated[
    str, typer.Argument(help="As `dead list` prints it: JOB/INDEX@GENERATION, or a letter's number.")
]


@app.command("list", short_help="What is dead, newest first")
def list_(
    *,
    job: OfJob = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many at most.")] = 100,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List what is dead, newest first: items whose latest outcome is `dead`, and dead letters.

    An item that runs again is not in the list; a letter that was redriven stays, and says so.
    """
    if job is not None:
        check_token("job", job)
    found, more = run_on_mesh(folder, url, lambda mesh: _list(mesh, job, limit))
    if json:
        print_json(found)
    else:
        rows = [
            (e.id, e.kind, e.job or e.origin, e.tries, _when(e.at_us), e.redriven, e.reason[:120])
            for e in found
        ]
        print_table(("id", "kind", "job or origin", "tries", "at", "redriven", "reason"), rows)
    if more:
        say(f"only the newest {len(found):,} are shown; there are more (--limit)")


@app.command(short_help="One of them, with its task or bytes")
def show(id: Id, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:  # noqa: A002
    """Show one dead thing whole: an item with its task and last error, a letter with its bytes and headers."""
    request = DeadRequest(id=_checked(id))

    async def fetch(mesh: Mesh) -> DeadReply:
        return await ask(mesh, "dead", request, DeadReply)

    found = run_on_mesh(folder, url, fetch).entries[0]
    if json:
        print_json(found)
        return
    values = ((name, getattr(found, name)) for name in DeadEntry.__struct_fields__ if name != "id")
    rows = [(name, _when(v) if name == "at_us" else v) for name, v in values if v is not None]
    print_table(("dead", found.id), rows)


@app.command(short_help="Let it go its way once more")
def redrive(
    id: Annotated[  # noqa: A002
        str | None,
        typer.Argument(
            help="As `dead list` prints it: JOB/INDEX@GENERATION, or a letter's number.", show_default=False
        ),
    ] = None,
    *,
    job: Annotated[
        str | None,
        typer.Option("--job", help="All that is dead of this job, instead of one id.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also a letter that was redriven before.")] = False,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Give one dead thing, or all of a job, another chance.

    An item runs again as the next generation of its job, which must have ended. A letter's bytes are stored once
    more on the subject that they came on; if nobody can take them still, they come back as another letter.
    """
    if (id is None) == (job is None):
        raise InvalidInput("name one ID, or --job JOB", field="id")
    if job is not None:
        check_token("job", job)
    request = RedriveRequest(job=job, id=None if id is None else _checked(id), again=again)

    async def fetch(mesh: Mesh) -> RedriveReply:
        return await ask(mesh, "redrive", request, RedriveReply, timeout_s=60.0)

    found = run_on_mesh(folder, url, fetch)
    if json:
        print_json(found)
    elif found.redriven:
        of = f" of {found.job}, items as generation {found.generation}" if found.generation else ""
        print_line(f"redriven: {found.redriven:,}{of}")
    if not found.redriven:
        say(f"nothing of {job} is dead: nothing is redriven" if not found.left else "nothing is redriven")
    if found.left:
        say(f"{found.left:,} stay as they are: {found.note}")


async def _list(mesh: Mesh, job: str | None, limit: int) -> tuple[list[DeadEntry], bool]:
    """Up to `limit` entries, page by page, and whether there are more."""
    found: list[DeadEntry] = []
    after: str | None = None
    while True:
        request = DeadRequest(job=job, after=after, limit=min(PAGE, limit - len(found)))
        page = await ask(mesh, "dead", request, DeadReply, timeout_s=30.0)
        found += page.entries
        after = page.next
        if after is None or len(found) >= limit:
            return found, after is not None


def _checked(id_: str) -> str:
    if not id_ or len(id_) > MAX_ID:
        raise InvalidInput(f"{id_[:80]!r} is no id of something dead", field="id")
    return id_


def _when(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S") if micros else ""
