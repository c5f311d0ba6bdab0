"""`headrace ledger verify` and `headrace rebuild`: the ledger proved from itself, the projection from the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from msgspec import Struct

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table, say
from headrace.cli.target import run_on_mesh

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

app = typer.Typer(help="The ledger of governed calls.", no_args_is_help=True, rich_markup_mode=None)
LONG_S = 600.0


class Verified(Struct, kw_only=True):
    """What the gateway read."""

    records: int
    calls: int
    open: int
    in_doubt: int
    heads_match: bool
    last_seq: int
    digest: str
    differences: list[str] = []
    went_back: str | None = None


class Rebuilt(Struct, kw_only=True):
    """What completion did."""

    records: int
    identical: bool
    tables: dict[str, bool]


@app.callback()
def root() -> None:
    """Commands of the ledger."""


@app.command(short_help="Prove the budgets' heads from the records")
def verify(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Read the whole ledger, fold it, and compare: exit code 1 if heads do not match, or the ledger went back."""

    async def work(mesh: Mesh) -> Verified:
        return await ask(mesh, "ledger.verify", {}, Verified, timeout_s=LONG_S)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json(found)
    else:
        print_table(("ledger", ""), [(n, getattr(found, n)) for n in Verified.__struct_fields__])
    if not found.heads_match or found.went_back:
        raise typer.Exit(Exit.FAILED)


def rebuild(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Drop the tables of governed calls and make them again from the ledger; say whether they had been identical."""

    async def work(mesh: Mesh) -> Rebuilt:
        return await ask(mesh, "rebuild", {}, Rebuilt, timeout_s=LONG_S)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json(found)
        return
    say(f"{found.records:,} records read: the tables {'were' if found.identical else 'were NOT'} identical")
