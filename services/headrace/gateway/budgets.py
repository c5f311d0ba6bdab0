"""The budgets of tenants: which of them bound a call, and setting one.

A budget and the list that names it are written in one batch. The list is read for each call after the call was taken
up (once for all that were taken up before the reading began), since a budget that binds a little later than it is set
would let calls through that it forbids.
"""

from __future__ import annotations

import asyncio
import time
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from headrace.contracts.errors import Conflict, Unavailable
from headrace.contracts.ledger import BudgetHead, BudgetName, Period, Reservation, Roster, Unit
from headrace.gateway.book import period_name
from headrace.gateway.ledger import Entry, Head, Ledger, Overtaken

TRIES = 20
FRESH_S = 0.5
"""How old a reading may be for a call that waited since: for a place at its callee, or for approval."""


class _Reading(Struct):
    """One reading of a tenant's list; `began_s` is infinite until it begins, then of the monotonic clock.

    Not of the loop's, which stands still for as long as a turn takes: what was set meanwhile would be missed.
    """

    task: asyncio.Task[list[BudgetName]]
    began_s: float = inf


class Budgets:
    """The budgets of every tenant of a mesh, as one gateway sees them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._readings: dict[str, _Reading] = {}

    async def of(self, tenant: str, agent: str, *, since_s: float | None = None) -> list[BudgetName]:
        """The budgets that bound a call of `agent`, as they stand at a moment after this was asked.

        With `since_s`, when the call was taken up by the monotonic clock: after that, and half a second ago at most.
        """
        reading = self._reading(tenant, since_s)
        found = await asyncio.shield(reading.task)
        return [b for b in found if b.agent in (None, agent)]

    def ahead(self, tenant: str, since_s: float) -> None:
        """Begin to read for a call that will ask in a moment."""
        self._reading(tenant, since_s)

    def _reading(self, tenant: str, since_s: float | None) -> _Reading:
        now = time.monotonic()
        least = now if since_s is None else max(since_s, now - FRESH_S)
        reading = self._readings.get(tenant)
        if reading is None or reading.began_s < least:
            # Whoever asks while it reads, and needs a later one, shares the next.
            reading = _Reading(asyncio.get_running_loop().create_task(self._read(tenant)))
            reading.task.add_done_callback(_heard)
            self._readings[tenant] = reading
        return reading

    async def _read(self, tenant: str) -> list[BudgetName]:
        # One turn of the loop, so that those who ask together share it.
        await asyncio.sleep(0)
        reading = self._readings[tenant]
        reading.began_s = time.monotonic()
        asyncio.get_running_loop().call_later(FRESH_S, self._forget, tenant, reading)
        try:
            found = await self._ledger.roster(tenant)
        except BaseException:
            self._forget(tenant, reading)
            raise
        return found.roster.budgets if found else []

    def _forget(self, tenant: str, reading: _Reading) -> None:
        if self._readings.get(tenant) is reading:
            del self._readings[tenant]

    async def set(
        self,
        tenant: str,
        budget: str,
        *,
        unit: Unit,
        limit: int,
        period: Period = "none",
        agent: str | None = None,
    ) -> BudgetHead:
        """Make a budget, or give one that exists another limit; what it has posted and holds stays.

        Raise `Conflict` if it exists with another unit, period or agent: its account would change its meaning.
        """
        name = BudgetName(budget=budget, unit=unit, period=period, agent=agent)
        for _ in range(TRIES):
            now_us = time.time_ns() // 1_000
            found = await self._ledger.head(tenant, budget)
            if found is not None:
                head = replace(found.head, limit=limit, at_us=now_us)
                if (head.unit, head.period, head.agent) != (unit, period, agent):
                    msg = (
                        f"budget {budget} of tenant {tenant} counts {head.unit}"
                        f"{f' by {head.period}' if head.period != 'none' else ', without periods,'}"
                        f" for {f'agent {head.agent}' if head.agent else 'every agent'}: only its limit can be "
                        "changed; give another meaning another name"
                    )
                    raise Conflict(msg, code="budget_exists")
                entries = [Entry(head, found.seq)]
            else:
                head = BudgetHead(
                    tenant=tenant,
                    budget=budget,
                    unit=unit,
                    limit=limit,
                    period=period,
                    agent=agent,
                    at_us=now_us,
                )
                named = await self._ledger.roster(tenant)
                others = named.roster.budgets if named else []
                roster = Roster(
                    tenant=tenant, budgets=[*(b for b in others if b.budget != budget), name], at_us=now_us
                )
                entries = [Entry(head, 0), Entry(roster, named.seq if named else 0)]
            try:
                await self._ledger.append(entries)
            except Overtaken:  # a call moved it, or somebody else sets budgets of this tenant
                continue
            except Unavailable:
                now = await self._ledger.head(tenant, budget)
                if now is None or now.head.limit != limit:
                    raise
            return head
        msg = f"budget {budget} is moved all the time: try again"
        raise Unavailable(msg)

    async def heads(self, tenant: str) -> list[Head]:
        """Every budget of a tenant as it stands, by name."""
        named = await self._ledger.roster(tenant)
        names = sorted(b.budget for b in named.roster.budgets) if named else []
        found = await asyncio.gather(*(self._ledger.head(tenant, name) for name in names))
        return [head for head in found if head is not None]


def reservations(
    budgets: list[BudgetName], amounts: dict[Unit, int | None], at_us: int
) -> tuple[list[Reservation], list[BudgetName]]:
    """What an attempt reserves of each budget, by unit; and the budgets whose unit it cannot tell (None)."""
    found = [
        Reservation(budget=b.budget, unit=b.unit, amount=amount, period=period_name(b.period, at_us))
        for b in budgets
        if (amount := amounts.get(b.unit)) is not None
    ]
    return found, [b for b in budgets if amounts.get(b.unit) is None]


def _heard(task: asyncio.Task[list[BudgetName]]) -> None:
    """Whoever waits hears of an error; a reading ahead may have nobody who does."""
    if not task.cancelled():
        task.exception()
