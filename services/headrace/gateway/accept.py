"""Taking a ledger as it is, after it lost records or somebody else wrote to it: an operator's decision.

Records are the truth then. What was seen before is asked for no more, and each budget's head that its records do not
make is written anew, as they make it: a cut can part a record from its head, and then nothing of it could be settled.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.contracts import codec
from headrace.contracts.account import KEPT_PERIODS
from headrace.contracts.api import ChecksRequest
from headrace.contracts.ledger import BudgetHead, BudgetName, PeriodAccount, Roster
from headrace.gateway.ledger import Entry, Ledger, Overtaken, StreamLedger
from headrace.gateway.ledger_mark import FILE, MarkFile, losses_of_completion
from headrace.gateway.verify import Proof, Verification, keep, read_ledger, verification
from headrace.mesh.checks.marks import read_mark
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.gateway")

TRIES = 3
"""Readings, where gateways move budgets meanwhile."""


async def accept(mesh: Mesh, folder: Path) -> Verification:
    """Take the ledger as it is, for completion and for the gateways of `folder`; return what it is then.

    It may be done again after a crash anywhere in it. Raise `OSError` if the folder cannot be written.
    """
    if lost := await losses_of_completion(mesh):
        request = ChecksRequest(accept_losses=[loss.id for loss in lost])
        await call_api(mesh, "checks", request, timeout_s=30.0)
    crash_point("losses-accepted")
    ledger, proof = StreamLedger(mesh), await read_ledger(mesh, None)
    for _ in range(TRIES):
        if not await mend_heads(mesh, ledger, proof) + await mend_lists(mesh, ledger, proof):
            break
        crash_point("heads-mended")
        proof = await read_ledger(mesh, None)
    mark = await read_mark(mesh, mesh.topology.ledger)
    if mark is not None:
        MarkFile(folder / FILE).write(mark)
    keep(folder, proof.proved())
    return verification(await read_ledger(mesh, proof.proved()), None)


async def mend_heads(mesh: Mesh, ledger: Ledger, proof: Proof) -> int:
    """Write each head that is not what its records make of it; return how many there were."""
    wrong = 0
    for (tenant, budget), head in proof.fold.heads.items():
        right = _as_records_make_it(head, proof.fold.accounts.get((tenant, budget), {}))
        if right.periods == head.periods:
            continue
        wrong += 1
        now = await ledger.head(tenant, budget)
        if now is None:
            # Its last message is damaged. No gateway moves a head that it cannot read, so nothing is overwritten.
            await _overwrite(mesh, mesh.subjects.ledger_budget(tenant, budget), codec.BUDGET_HEAD, right)
        elif now.head == head:
            try:
                await ledger.append([Entry(right, now.seq)])
            except Overtaken:
                continue  # it moved after it was read: it is read again
        else:
            continue
        log.warning("a budget is set to what its records say", extra={"tenant": tenant, "budget": budget})
    return wrong


async def mend_lists(mesh: Mesh, ledger: Ledger, proof: Proof) -> int:
    """Put every budget that has a head on its tenant's list; return how many lists lacked one."""
    tenants = sorted({tenant for tenant, _ in proof.unlisted})
    for tenant in tenants:
        named = await ledger.roster(tenant)
        names = [
            BudgetName(budget=head.budget, unit=head.unit, period=head.period, agent=head.agent)
            for (owner, _), head in sorted(proof.fold.heads.items())
            if owner == tenant
        ]
        roster = Roster(tenant=tenant, budgets=names, at_us=time.time_ns() // 1_000)
        if named is None:
            await _overwrite(mesh, mesh.subjects.ledger_roster(tenant), codec.ROSTER, roster)
        else:
            with contextlib.suppress(Overtaken):
                await ledger.append([Entry(roster, named.seq)])
    return len(tenants)


async def _overwrite(
    mesh: Mesh, subject: str, schema: codec.Schema[Any], record: BudgetHead | Roster
) -> None:
    headers = {codec.SCHEMA_HEADER: schema.name}
    await publish(mesh, mesh.topology.ledger, subject, schema.encode(record), headers=headers)


def _as_records_make_it(head: BudgetHead, accounts: dict[str, PeriodAccount]) -> BudgetHead:
    """`head` with the periods that it has to have: what is held, and the latest."""
    recent = sorted({*head.periods, *accounts})[-KEPT_PERIODS:]
    periods = {
        name: account
        for name, account in accounts.items()
        if account.held or name in head.periods or name in recent
    }
    if all(
        head.periods.get(n, PeriodAccount()) == periods.get(n, PeriodAccount())
        for n in {*head.periods, *periods}
    ):
        return head
    return replace(head, periods=periods, at_us=time.time_ns() // 1_000)
