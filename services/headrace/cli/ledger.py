"""`headrace ledger verify|accept`, `headrace rebuild`: the ledger proved, the projection made again from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from msgspec import Struct

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.errors import InvalidInput
from headrace.mesh.settings import read_mesh_file

if TYPE_CHECKING:
    from headrace.gateway.verify import Verification
    from headrace.mesh.connection import Mesh

app = typer.Typer(
    help="The ledger of governed calls: proved from itself, and from what was seen of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
LONG_S = 600.0


class Rebuilt(Struct, kw_only=True):
    """What completion did."""

    records: int
    identical: bool
    tables: dict[str, int]
    unreadable: int = 0


@app.callback()
def root() -> None:
    """Commands of the ledger."""


@app.command(short_help="Prove the budgets from the records, and that nothing is gone")
def verify(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Read the whole ledger, fold it, and compare: budgets with their records, its end with what was seen of it.

    It needs the broker only, and no gateway. Exit code 1 if budgets do not match, or the ledger went back: then
    `differences` name calls and budgets, `went_back` says what is gone and who saw it.
    """

    async def work(mesh: Mesh) -> Verification:
        from headrace.gateway.verify import verify

        return await verify(mesh, _folder(mesh))

    found = run_on_mesh(folder, url, work)
    _show(found, json=json)
    if found.differences:
        say(
            "error: budgets and records do not match: somebody wrote to the ledger who is no gateway, or its storage "
            "is damaged. Stop the gateways, and restore the broker's storage (docs/ledger.md)"
        )
    if found.went_back:
        from headrace.gateway.ledger_mark import MEND

        say(f"error: {found.went_back}. {MEND}")
    if found.differences or found.went_back:
        raise typer.Exit(Exit.FAILED)


@app.command(short_help="Take a ledger that went back as it is")
def accept(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Take the ledger as it is after it lost records: gateways of this folder start again, and are told no more.

    Calls whose records are gone may then be made a second time: see first which they are (docs/ledger.md). Budgets
    are set to what the records that are left make of them. On every machine that runs gateways.
    """

    async def work(mesh: Mesh) -> Verification:
        from headrace.gateway.accept import accept

        where = _folder(mesh)
        try:
            return await accept(mesh, where)
        except OSError as e:
            raise InvalidInput(f"cannot write in {where}: {e.strerror or e}", field="dir") from None

    _show(run_on_mesh(folder, url, work), json=json)


def _show(found: Verification, *, json: bool) -> None:
    if json:
        print_json(found)
        return
    names = ("records", "calls", "open", "in_doubt", "heads_match", "last_seq", "digest")
    print_table(("ledger", ""), [(n, getattr(found, n)) for n in names])
    for difference in found.differences:
        say(difference)


def _folder(mesh: Mesh) -> Path:
    """Where the gateways of this mesh keep what they saw; nowhere if the folder is that of another mesh."""
    folder = Path(mesh.settings.dir)
    local = read_mesh_file(folder)
    return folder if local is None or local.url == mesh.settings.url else folder / "nowhere"


def rebuild(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Make the tables of governed calls again from the ledger, and say whether they had been identical.

    Exit code 1 if they had not been; they are right now in any case. Work goes on meanwhile.
    """

    async def work(mesh: Mesh) -> Rebuilt:
        return await ask(mesh, "rebuild", {}, Rebuilt, timeout_s=LONG_S)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json(found)
    elif found.identical:
        say(f"{found.records:,} records read: the tables were identical")
    else:
        wrong = ", ".join(f"{n:,} rows of {table}" for table, n in found.tables.items() if n)
        say(f"{found.records:,} records read: {wrong} were NOT as the ledger says; now they are")
    if not found.identical:
        raise typer.Exit(Exit.FAILED)
