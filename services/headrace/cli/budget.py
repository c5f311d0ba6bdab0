"""`headrace budget set|show`: what tenants and agents may spend, in calls, tokens or money."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from headrace.cli.api import ask
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table
from headrace.cli.target import run_on_mesh
from headrace.contracts.calls import BudgetLine, BudgetOrder, BudgetQuery
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

app = typer.Typer(
    help="Budgets: every call reserves what it may cost before it is made, in each budget that bounds it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Tenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Whose budget [default: the mesh's tenant].", show_default=False),
]


class Unit(StrEnum):
    """What a budget counts."""

    CALLS = "calls"
    TOKENS = "tokens"
    MICRO = "micro"


class Period(StrEnum):
    """When a budget begins anew, in UTC."""

    DAY = "day"
    MONTH = "month"
    NONE = "none"


class _Budgets(Struct):
    budgets: list[BudgetLine]


@app.command("set", short_help="Make a budget, or change its limit")
def set_(
    name: Annotated[str, typer.Argument(help="Name of the budget.")],
    *,
    unit: Annotated[Unit, typer.Option("--unit", help="What it counts; micro: micro-units of money.")],
    limit: Annotated[int, typer.Option("--limit", min=0, max=10**15, help="How much in each period.")],
    tenant: Tenant = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Bound one agent only.", show_default=False)
    ] = None,
    period: Annotated[Period, typer.Option("--period", help="When it begins anew, in UTC.")] = Period.NONE,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Make a budget, or give one that exists another limit; what it has posted and holds stays."""
    request = BudgetOrder(
        budget=check_token("budget", name),
        unit=unit.value,  # type: ignore[arg-type]  # the words of the contract
        limit=limit,
        tenant=None if tenant is None else check_token("tenant", tenant),
        agent=None if agent is None else check_token("agent", agent),
        period=period.value,  # type: ignore[arg-type]  # the words of the contract
    )

    async def work(mesh: Mesh) -> BudgetLine:
        return await ask(mesh, "budget.set", request, BudgetLine)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json(found)
    else:
        _print([found])


@app.command(short_help="What is spent, held and left")
def show(
    name: Annotated[str | None, typer.Argument(help="One budget [default: all].", show_default=False)] = None,
    *,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Of one tenant [default: of all].", show_default=False)
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show budgets in their current period. What is held in doubt is part of what is held."""
    request = BudgetQuery(
        budget=None if name is None else check_token("budget", name),
        tenant=None if tenant is None else check_token("tenant", tenant),
    )

    async def work(mesh: Mesh) -> _Budgets:
        return await ask(mesh, "budget.show", request, _Budgets)

    found = run_on_mesh(folder, url, work).budgets
    if json:
        print_json(found)
    else:
        _print(found)


def _print(lines: list[BudgetLine]) -> None:
    columns = BudgetLine.__struct_fields__
    print_table(columns, [[getattr(line, c) for c in columns] for line in lines])
