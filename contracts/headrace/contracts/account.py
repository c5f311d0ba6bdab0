"""What the ledger's records mean together: the state of each call, and what each budget has posted and holds.

Pure functions over records in their order: the gateway decides by them, the projection is made by them, and
`ledger verify` compares them with the heads that were written. A record that cannot follow those before it raises
`LedgerBroken`: such a ledger was not written by these rules, and nobody should go on as if it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    CallRecord,
    CallRequest,
    Completed,
    Failed,
    InDoubt,
    Intent,
    PeriodAccount,
    Posting,
    Roster,
    Unit,
)

AttemptState = Literal["open", "completed", "failed", "attempt_failed", "in_doubt"]
CallState = Literal["open", "retrying", "completed", "failed", "in_doubt"]

KEPT_PERIODS = 2
"""Periods that a head keeps though nothing is held in them: this one and the last."""


class LedgerBroken(HeadraceError):
    """The ledger's records do not fit together; it names the call or the budget, and what is wrong."""

    code = "ledger_broken"


# --- calls ------------------------------------------------------------------------------------------


class AttemptView(Struct, frozen=True):
    """One attempt: its intent, the record that ended it, if any, and whether what it reserved is still held."""

    intent: Intent
    state: AttemptState = "open"
    end: Completed | Failed | AttemptFailed | InDoubt | None = None
    held: bool = True


class CallView(Struct, frozen=True):
    """A call as its records tell it."""

    call: str
    tenant: str
    attempts: tuple[AttemptView, ...]

    @property
    def last(self) -> AttemptView:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def request(self) -> CallRequest:
        """What was asked."""
        return self.attempts[0].intent.request

    @property
    def state(self) -> CallState:
        """Where the call stands. A failure says nothing of an earlier attempt that is in doubt: so is the call then."""
        last = self.last.state
        if last in ("failed", "attempt_failed") and any(a.state == "in_doubt" for a in self.attempts):
            return "in_doubt"
        return "retrying" if last == "attempt_failed" else last

    @property
    def terminal(self) -> bool:
        """Whether nothing follows by itself: completed or failed (which the same key may try again, if it says so)."""
        return self.state in ("completed", "failed")

    @property
    def may_have_applied(self) -> bool:
        """Whether any attempt completed, is open or in doubt, or ended without anybody knowing."""
        return any(
            a.state in ("open", "completed", "in_doubt")
            or (isinstance(a.end, AttemptFailed) and a.end.may_have_applied)
            for a in self.attempts
        )


def advance(view: CallView | None, record: CallRecord) -> CallView:
    """`view` after one more record; raise `LedgerBroken` if that record cannot follow."""
    if isinstance(record, Intent):
        return _begin(view, record)
    if view is None:
        raise _broken(record, "has no intent before it")
    if record.attempt > len(view.attempts):
        raise _broken(record, "is of an attempt that has no intent")
    attempt = view.attempts[record.attempt - 1]
    if attempt.state not in _BEFORE[type(record)]:
        raise _broken(record, f"follows an attempt that is {attempt.state}")
    if record.attempt < len(view.attempts) and attempt.state != "in_doubt":
        raise _broken(record, "is of an attempt that is over")
    if isinstance(record, Failed) and not record.resolved_by and _unknown_before(view, record.attempt):
        raise _broken(record, "says that nothing happened, and an earlier attempt may have applied it")
    held = attempt.held and isinstance(record, InDoubt)
    ended = replace(attempt, state=_AFTER[type(record)], end=record, held=held)
    attempts = (*view.attempts[: record.attempt - 1], ended, *view.attempts[record.attempt :])
    return replace(view, attempts=attempts)


_BEFORE: dict[type, tuple[AttemptState, ...]] = {
    Completed: ("open", "in_doubt"),
    Failed: ("open", "in_doubt", "attempt_failed"),
    AttemptFailed: ("open", "in_doubt"),
    InDoubt: ("open", "attempt_failed"),
}
_AFTER: dict[type, AttemptState] = {
    Completed: "completed",
    Failed: "failed",
    AttemptFailed: "attempt_failed",
    InDoubt: "in_doubt",
}


def _unknown_before(view: CallView, attempt: int) -> bool:
    return any(
        isinstance(a.end, AttemptFailed) and a.end.may_have_applied for a in view.attempts[: attempt - 1]
    )


def _begin(view: CallView | None, intent: Intent) -> CallView:
    if view is None:
        if intent.attempt != 1:
            raise _broken(intent, "is the first record of its call")
        return CallView(intent.call, intent.tenant, (AttemptView(intent),))
    if intent.attempt != len(view.attempts) + 1:
        raise _broken(intent, f"follows attempt {len(view.attempts)}")
    if intent.request.fingerprint != view.request.fingerprint:
        raise _broken(intent, "asks for something else than the attempts before it")
    end = view.last.end
    if end is None or isinstance(end, Completed) or (isinstance(end, Failed) and not end.retryable):
        raise _broken(intent, f"follows an attempt that is {view.last.state}")
    return replace(view, attempts=(*view.attempts, AttemptView(intent)))


def _broken(record: CallRecord, why: str) -> LedgerBroken:
    kind = type(record).__name__
    return LedgerBroken(f"call {record.call}: {kind} of attempt {record.attempt} {why}")


def view_of(records: Iterable[CallRecord]) -> CallView | None:
    """The call that these records, in order, tell of; None if there are none."""
    view: CallView | None = None
    for record in records:
        view = advance(view, record)
    return view


# --- money ------------------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """What one record changes in one period of one budget."""

    budget: str
    period: str
    held: int = 0
    in_doubt: int = 0
    posted: int = 0
    overrun: int = 0


def changes(view: CallView | None, record: CallRecord) -> Iterator[Change]:
    """What `record` changes in the budgets, `view` being the call before it."""
    if isinstance(record, Intent):
        for r in record.reservations:
            yield Change(r.budget, r.period, held=r.amount)
        return
    if view is None or record.attempt > len(view.attempts):
        raise _broken(record, "has no intent before it")
    attempt = view.attempts[record.attempt - 1]
    reservations = attempt.intent.reservations if attempt.held else []
    if isinstance(record, InDoubt):
        for r in reservations:
            yield Change(r.budget, r.period, in_doubt=r.amount)
        return
    if not attempt.held:  # it was released: what turns out to have been paid is posted beyond it
        for p in record.postings:
            if p.reserved:
                raise _broken(record, "releases what is released")
            yield Change(p.budget, p.period, posted=p.amount, overrun=p.amount)
        return
    postings = {(p.budget, p.period): p for p in record.postings}
    if len(postings) != len(record.postings) or len(postings) != len(reservations):
        raise _broken(record, "does not settle each reservation once")
    for r in reservations:
        posting = postings.get((r.budget, r.period))
        if posting is None or posting.reserved != r.amount:
            raise _broken(record, f"does not settle what was reserved of budget {r.budget}")
        yield Change(
            r.budget,
            r.period,
            held=-r.amount,
            in_doubt=-r.amount if attempt.state == "in_doubt" else 0,
            posted=posting.amount,
            overrun=max(0, posting.amount - r.amount),
        )


def settle(attempt: AttemptView, amounts: dict[Unit, int] | None = None) -> list[Posting]:
    """Postings that release all that the attempt still holds, and post `amounts` by unit (0 where none is given)."""
    return [
        Posting(
            budget=r.budget,
            unit=r.unit,
            reserved=r.amount if attempt.held else 0,
            amount=(amounts or {}).get(r.unit, 0),
            period=r.period,
        )
        for r in attempt.intent.reservations
        if attempt.held or (amounts or {}).get(r.unit)
    ]


def moved(account: PeriodAccount, change: Change) -> PeriodAccount:
    """`account` after `change`; raise `LedgerBroken` if more is released than is held."""
    held, in_doubt = account.held + change.held, account.in_doubt + change.in_doubt
    if held < 0 or not 0 <= in_doubt <= held:
        raise LedgerBroken(
            f"budget {change.budget}: {held} would be held and {in_doubt} in doubt in period {change.period!r}"
        )
    return PeriodAccount(
        posted=account.posted + change.posted,
        held=held,
        in_doubt=in_doubt,
        overrun=account.overrun + change.overrun,
    )


def next_head(head: BudgetHead, todo: Sequence[Change], *, now: str, at_us: int) -> BudgetHead:
    """`head` after the changes of one batch; `now` is the name of the current period.

    Past periods in which nothing is held are left out, but the last one.
    """
    periods = dict(head.periods)
    for change in todo:
        periods[change.period] = moved(periods.get(change.period, PeriodAccount()), change)
    recent = sorted({*periods, now})[-KEPT_PERIODS:]
    kept = {name: account for name, account in periods.items() if name in recent or account.held}
    return replace(head, periods=kept, at_us=at_us)


def room(head: BudgetHead, period: str) -> int:
    """What may still be reserved in `period`; never negative."""
    account = head.periods.get(period, PeriodAccount())
    return max(0, head.limit - account.posted - account.held)


# --- the whole ledger -------------------------------------------------------------------------------


class Fold:
    """The whole ledger, record by record: every call, and every budget as its records make it."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], CallView] = {}
        self.accounts: dict[tuple[str, str], dict[str, PeriodAccount]] = {}
        self.heads: dict[tuple[str, str], BudgetHead] = {}
        self.records = 0

    def take(self, record: CallRecord | BudgetHead | Roster) -> None:
        """One more record, in the order of the stream."""
        self.records += 1
        if isinstance(record, Roster):
            return
        if isinstance(record, BudgetHead):
            self.heads[record.tenant, record.budget] = record
            return
        key = (record.tenant, record.call)
        before = self.calls.get(key)
        self.calls[key] = advance(before, record)
        for change in changes(before, record):
            periods = self.accounts.setdefault((record.tenant, change.budget), {})
            periods[change.period] = moved(periods.get(change.period, PeriodAccount()), change)

    def differences(self) -> list[str]:
        """Where the heads say something else than the records: one sentence for each; empty at the end of any batch."""
        found: list[str] = []
        for key in sorted({*self.heads, *self.accounts}):
            head, mine = self.heads.get(key), self.accounts.get(key, {})
            name = "/".join(key)
            if head is None:
                found.append(f"budget {name} is charged and has no head")
                continue
            # A head may forget old periods, but none in which something is held, and never the latest.
            known = {*head.periods, *(p for p, a in mine.items() if a.held), *sorted(mine)[-1:]}
            for period in sorted(known):
                theirs = head.periods.get(period, PeriodAccount())
                ours = mine.get(period, PeriodAccount())
                if theirs != ours:
                    found.append(
                        f"budget {name}, period {period!r}: its head says {theirs}, its records {ours}"
                    )
        return found
