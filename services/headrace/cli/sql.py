"""`headrace sql`: one read-only statement on the data plane, answered by the completion service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.api import ask
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh


def sql(
    statement: Annotated[
        str, typer.Argument(help="A SELECT; tables: jobs, outcomes, dead, …", show_default=False)
    ],
    *,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, max=10_000, help="Rows at most.")] = 1_000,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Ask the data plane: reading only, without access to files or the network, rows and time bounded.

    With --json an array with one object for each row. That rows were cut is said on standard error.
    """
    if not statement.strip():
        raise InvalidInput("the statement is empty", field="sql")
    request = QueryRequest(sql=statement, max_rows=max_rows)

    async def fetch(mesh: Mesh) -> QueryReply:
        return await ask(mesh, "query", request, QueryReply, timeout_s=60.0)

    found = run_on_mesh(folder, url, fetch)
    if json:
        names = unique_names(found.columns)
        print_json([dict(zip(names, row, strict=True)) for row in found.rows])
    else:
        print_table(found.columns, found.rows)
    if found.truncated:
        say(
            f"only the first {len(found.rows):,} rows are shown; there are more (--max-rows, or `headrace results`)"
        )


def unique_names(columns: list[str]) -> list[str]:
    """`columns` with a number after each repeated name, so that no value of a row is lost in an object."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for column in columns:
        seen[column] = seen.get(column, 0) + 1
        names.append(column if seen[column] == 1 else f"{column}_{seen[column]}")
    return names
