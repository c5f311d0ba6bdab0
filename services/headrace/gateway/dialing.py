"""What it is to make one attempt at a callee, and to ask a callee what became of one."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from headrace.contracts.account import CallView
from headrace.contracts.ledger import CallError, CallOutcome, CallTimes, CallUsage
from headrace.gateway.callees import Body, Callee
from headrace.gateway.verdicts import Seen


class Order(Struct, frozen=True, kw_only=True):
    """One attempt that is about to be made. `until_us`: when it must have ended."""

    call: str
    tenant: str
    attempt: int
    callee: Callee
    body: Body
    remote_key: str | None
    until_us: int
    traceparent: str | None = None


class Attempted(Struct, frozen=True, kw_only=True):
    """How an attempt went. `outcome` and `usage` stand for a whole or partial answer, `error` for everything else."""

    seen: Seen
    outcome: CallOutcome | None = None
    usage: CallUsage = CallUsage()
    error: CallError = CallError(type="unknown")
    request_sent: bool = True
    retry_after_s: float | None = None
    live: CallOutcome | None = None
    """What the caller is told now, where it is more than what is captured."""
    times: CallTimes = CallTimes()


class Dialer(Protocol):
    """Makes attempts. It retries nothing by itself, and never raises for what a callee does."""

    async def dial(self, order: Order) -> Attempted:
        """Make one attempt, to its end or its time-out."""
        ...

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """What became of the last attempt: `ANSWERED` with its outcome, `NOT_SENT` for "not applied", None: unknown."""
        ...
