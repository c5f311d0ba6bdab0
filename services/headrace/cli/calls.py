"""`headrace calls list|show|resolve|approve|deny`: what was called, and a person's word about it."""

from __future__ import annotations

import getpass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.api import ask
from headrace.cli.call import show_answer
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.calls import CallAnswer, CallApproval, CallDecision, CallHistory, CallRef
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

STATES = ("open", "retrying", "completed", "failed", "in_doubt")
COLUMNS = (
    "call", "tenant", "state", "callee", "effect", "agent", "model", "attempts", "posted_micro", "held_micro",
    "error_type", "resolved_by", "asked_at", "last_at",
)  # fmt: skip

app = typer.Typer(
    help="Governed calls: what was called, what is in doubt, and deciding about it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Call = Annotated[str, typer.Argument(help="Id of the call, as `headrace call` and `calls list` print it.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Where an id stands in several tenants.", show_default=False)
]
Why = Annotated[str, typer.Option("--why", help="The reason; it is recorded with your name.")]
By = Annotated[
    str | None,
    typer.Option("--by", help="Who says so [default: the name you are logged in by].", show_default=False),
]


class Verdict(StrEnum):
    """What an operator found out."""

    APPLIED = "applied"
    NOT_APPLIED = "not-applied"


@app.command("list", short_help="Calls, newest first")
def list_(
    *,
    state: Annotated[
        str | None, typer.Option("--state", help=f"One of {', '.join(STATES)}.", show_default=False)
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of one tenant.", show_default=False)] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")] = 100,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List calls, newest first, as the data plane has them: a moment behind the ledger."""
    if state is not None and state not in STATES:
        raise InvalidInput(f"--state {state!r} is unknown: use one of {', '.join(STATES)}", field="state")
    conditions = [f"state = '{state}'"] if state else []
    if tenant is not None:
        conditions.append(f"tenant = '{check_token('tenant', tenant)}'")
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    # Nothing of it is free text: a known state, a checked name, a number.
    sql = f"SELECT {', '.join(COLUMNS)} FROM calls {where} ORDER BY last_sequence DESC LIMIT {limit}"  # noqa: S608

    async def work(mesh: Mesh) -> QueryReply:
        return await ask(mesh, "query", QueryRequest(sql=sql, max_rows=limit), QueryReply, timeout_s=20.0)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json([dict(zip(found.columns, row, strict=True)) for row in found.rows])
    else:
        print_table(found.columns, found.rows)


@app.command(short_help="A call's records and evidence, in order")
def show(
    call: Call, *, tenant: Tenant = None, folder: Dir = None, url: Url = None, json: Json = False
) -> None:
    """Show what happened to a call, in order, straight from the ledger."""

    async def work(mesh: Mesh) -> CallHistory:
        return await ask(mesh, "calls.show", CallRef(call=_id(call), tenant=_tenant(tenant)), CallHistory)

    found = run_on_mesh(folder, url, work)
    if json:
        print_json(found)
        return
    head = [
        (n, getattr(found, n))
        for n in ("tenant", "state", "callee", "agent", "effect", "posted_micro", "held_micro")
    ]
    print_table(("call", found.call_id), head)
    rows = [_line(r, str(r.get("type", ""))) for r in found.records] + [
        _line(e, f"evidence: {e.get('kind', '')}") for e in found.evidence
    ]
    print_table(("at (µs)", "what", "attempt", "by", "said"), sorted(rows, key=lambda row: row[0]))


@app.command(short_help="Decide a call in doubt")
def resolve(
    call: Call,
    verdict: Annotated[Verdict, typer.Argument(help="Whether the callee did it.")],
    *,
    why: Why,
    cost_micro: Annotated[
        int | None,
        typer.Option(
            "--cost-micro",
            min=0,
            help="What it cost [default: what is held if applied, else 0].",
            show_default=False,
        ),
    ] = None,
    by: By = None,
    tenant: Tenant = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """End a call in doubt by what you found out; the record says who and why."""
    request = CallDecision(
        call=_id(call),
        verdict=verdict.value,  # type: ignore[arg-type]  # the words of the contract
        tenant=_tenant(tenant),
        cost_micro=cost_micro,
        why=_why(why),
        by=by or _me(),
    )

    async def work(mesh: Mesh) -> CallAnswer:
        return await ask(mesh, "calls.resolve", request, CallAnswer, timeout_s=40.0)

    show_answer(run_on_mesh(folder, url, work), json=json)


@app.command(short_help="Let a waiting call be made")
def approve(
    call: Call, *, why: Why = "", by: By = None, tenant: Tenant = None, folder: Dir = None, url: Url = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Approve a call that waits for approval."""
    _decide("calls.approve", call, why, by, tenant, folder, url, json=json)


@app.command(short_help="Refuse a waiting call")
def deny(
    call: Call, *, why: Why, by: By = None, tenant: Tenant = None, folder: Dir = None, url: Url = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Deny a call that waits for approval: it is refused, and never made."""
    _decide("calls.deny", call, _why(why), by, tenant, folder, url, json=json)


def _decide(
    endpoint: str,
    call: str,
    why: str,
    by: str | None,
    tenant: str | None,
    folder: Any,
    url: str | None,
    *,
    json: bool,
) -> None:
    request = CallApproval(call=_id(call), tenant=_tenant(tenant), why=why, by=by or _me())

    async def work(mesh: Mesh) -> CallAnswer:
        return await ask(mesh, endpoint, request, CallAnswer)

    show_answer(run_on_mesh(folder, url, work), json=json)


def _line(entry: dict[str, Any], what: str) -> tuple[int, str, int, str, str]:
    error: dict[str, Any] = entry.get("error") or {}
    said = str(error.get("message") or entry.get("why") or "")
    by = str(entry.get("owner") or entry.get("by") or "")
    return int(entry.get("at_us", 0)), what, int(entry.get("attempt", 0)), by, said[:200]


def _id(call: str) -> str:
    return check_token("call", call)


def _tenant(tenant: str | None) -> str | None:
    return None if tenant is None else check_token("tenant", tenant)


def _why(why: str) -> str:
    if not why.strip():
        raise InvalidInput("--why is empty: say what you found out", field="why")
    return why[:2_048]


def _me() -> str:
    try:
        return getpass.getuser()[:256]
    except (OSError, KeyError):
        return "operator"
