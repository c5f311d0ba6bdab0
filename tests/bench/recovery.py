"""How long a gateway takes to find out what became of the calls that its last life left open.

The open calls are written as a gateway writes them: by the book of a life of the gateway, in batches with a budget's
head. That life ends there, as by SIGKILL. The next one is started, and is ready once it has put each call in doubt.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Final

from msgspec import Struct

from headrace.contracts.ledger import CallRequest, Effect, Intent, Reservation
from headrace.gateway.book import Book
from headrace.gateway.budgets import Budgets
from headrace.gateway.ledger import StreamLedger
from headrace.gateway.owners import Owners
from headrace.gateway.records import Me
from headrace.gateway.verify import verify
from tests.bench.fleet import Durability, Fleet

TENANT: Final = "bench"
EFFECTS: Final[tuple[Effect, ...]] = ("cost_bearing", "money", "destructive")
AT_ONCE: Final = 2_000
CALLEE: Final = """[callees.{effect}]
kind = "openai"
effect = "{effect}"
base_url = "http://127.0.0.1:9"
free = true
"""


class Took(Struct, frozen=True, kw_only=True):
    """What was seen, in seconds: a start on an empty ledger, the same on one with open calls, and the difference."""

    durability: str
    intents: int
    empty_s: float
    start_s: float
    in_doubt: int

    @property
    def classified_s(self) -> float:
        """From the start of the process until every call is in doubt."""
        return self.start_s

    def __str__(self) -> str:
        more = self.start_s - self.empty_s
        return (
            f"recovery, {self.durability}: a gateway that finds {self.intents:,} open calls is ready after "
            f"{self.start_s:.2f} s, all of them in doubt ({self.empty_s:.2f} s without them: "
            f"{more:.2f} s, {more / self.intents * 1e6:.0f} µs a call)"
        )


async def measure(folder: Path, durability: Durability, intents: int) -> Took:
    """Leave so many calls open, start a gateway, and prove from the ledger that each is in doubt."""
    async with Fleet(folder, durability) as fleet:
        (folder / "headrace.toml").write_text("".join(CALLEE.format(effect=e) for e in EFFECTS), "utf-8")
        began = time.monotonic()
        await fleet.start("gateway")
        empty_s = time.monotonic() - began
        await fleet.stop("gateway")
        await leave_open(fleet, intents)
        began = time.monotonic()
        await fleet.start("gateway")
        start_s = time.monotonic() - began
        found = await verify(fleet.mesh, folder)
        if (found.in_doubt, found.open, found.heads_match) != (intents, 0, True):
            raise RuntimeError(f"of {intents} open calls {found.in_doubt} are in doubt: {found}")
    return Took(
        durability=durability, intents=intents, empty_s=empty_s, start_s=start_s, in_doubt=found.in_doubt
    )


async def leave_open(fleet: Fleet, intents: int) -> None:
    """Write intents, and no more."""
    ledger = StreamLedger(fleet.mesh)
    await Budgets(ledger).set(TENANT, "calls", unit="calls", limit=10**9)
    me, book = await Owners(fleet.mesh).begin("gateway"), Book(ledger)
    for start in range(0, intents, AT_ONCE):
        numbers = range(start, min(intents, start + AT_ONCE))
        await asyncio.gather(*(book.write(_intent(me, n), None, 0, patience_s=60.0) for n in numbers))


def _intent(me: Me, number: int) -> Intent:
    effect = EFFECTS[number % len(EFFECTS)]
    now_us = time.time_ns() // 1_000
    return Intent(
        call=uuid.uuid4().hex,
        tenant=TENANT,
        attempt=1,
        owner=me.owner,
        epoch=me.epoch,
        at_us=now_us,
        lease_until_us=now_us + 125_000_000,
        request=CallRequest(callee=effect, effect=effect, principal="a", fingerprint="0" * 64),
        reservations=[Reservation(budget="calls", unit="calls", amount=1)],
        max_cost_micro=1_000,
    )
