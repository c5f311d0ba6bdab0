"""`headrace calls list|show|resolve|approve|deny`: what was called, and a person's word about it."""

from __future__ import annotations

import getpass
import re
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from headrace.cli.api import ask
from headrace.cli.call import show_answer
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table, say
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.calls import (
    CallAnswer,
    CallApproval,
    CallDecision,
    CallHistory,
    CallRef,
    CallsWaiting,
    CallsWaitingReply,
    CallWaiting,
)
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

STATES = ("open", "retrying", "completed", "failed", "in_doubt")
IN_PROGRESS = "in_progress"
"""As a call is answered: open or retrying."""
WAITING = "awaiting_approval"
"""Such calls have no record yet: the gateway knows them, and not the data plane."""
COLUMNS = (
    "call AS call_id", "tenant", "state", "callee", "effect", "agent", "model", "attempts", "posted_micro",
    "held_micro", "error_type", "resolved_by", "asked_at", "last_at",
)  # fmt: skip
SHOWN = (
    "call_id", "state", "callee", "tenant", "agent", "attempts", "posted_micro", "held_micro", "error_type", "asked_at",
)  # fmt: skip
"""What people see of it."""

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}")

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
        str | None,
        typer.Option(
            "--state", help=f"One of {', '.join((*STATES, IN_PROGRESS, WAITING))}.", show_default=False
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of one tenant.", show_default=False)] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")] = 100,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List calls, newest first, as the data plane has them: a moment behind the ledger.

    With `--state awaiting_approval` those that wait for approval, oldest first.
    """
    if state == WAITING:
        _list_waiting(tenant, limit, folder, url, json=json)
        return
    if state not in (None, *STATES, IN_PROGRESS):
        names = ", ".join((*STATES, IN_PROGRESS, WAITING))
        raise InvalidInput(f"--state {state!r} is unknown: use one of {names}", field="state")
    conditions = (
        ["state IN ('open', 'retrying')" if state == IN_PROGRESS else f"state = '{state}'"] if state else []
    )
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
        at = [found.columns.index(name) for name in SHOWN]
        print_table(SHOWN, [[_short(row[i]) for i in at] for row in found.rows])
    if found.truncated or len(found.rows) == limit:
        say(f"the newest {len(found.rows):,}; there may be more (--limit, --state, --tenant)")


def _list_waiting(
    tenant: str | None, limit: int, folder: Path | None, url: str | None, *, json: bool
) -> None:
    request = CallsWaiting(tenant=_tenant(tenant), limit=limit)

    async def work(mesh: Mesh) -> CallsWaitingReply:
        return await ask(mesh, "calls.waiting", request, CallsWaitingReply, timeout_s=20.0)

    found = run_on_mesh(folder, url, work).calls
    if json:
        print_json([{"call_id": line.call, **asdict(line)} for line in found])
    else:
        columns = CallWaiting.__struct_fields__
        print_table(columns, [[getattr(line, name) for name in columns] for line in found])


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
    lines = [(_time(at), *rest) for at, *rest in sorted(rows, key=lambda row: row[0])]
    print_table(("at (UTC)", "what", "attempt", "by", "said"), lines)


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


def _short(value: Any) -> Any:
    """A time of the data plane to the second."""
    return value[:19].replace("T", " ") if isinstance(value, str) and _TIME.match(value) else value


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if at_us else ""


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
