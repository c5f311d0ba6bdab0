"""One reading of a job's account, and whether it balances: plain numbers, nothing is read here.

Items move from tasks to results to rows while the three sources are read one after the other, so one reading cannot
be exact. It is a sandwich: manifest, tasks, results, rows, results, leases, tasks, manifest. Then

    upper = tasks + results + rows, read in the direction of the flow: sees each item at least once
    lower = rows + tasks, read against it: sees an item twice only while its task is leased
            (its result or row is there, and the ack of the task is on its way, or lost with its worker; a broker
            that was killed may have forgotten the lease: then the tasks themselves are looked at)

and the account balances iff `lower - leased ≤ submitted` (at the end) and `submitted ≤ upper` (at the beginning).
At rest both are the same sum. Results do not count in `lower`: two may be stored for one item (a worker died between
storing one and acking), which landing settles.

*Shapes.* The same holds for each shape, but a result's subject does not name one. So what the shapes lack in tasks and
rows is added up, and must be among the results; what a shape has too much must be leased from its own consumer.

*Retries.* A retry takes the outcomes of `n` items off the account (their latest generation has none), and then stores
their tasks, so an item has one stage more, before the tasks: `waiting = n - k`, where `k` is what the retry's progress
record says is stored. It is read with the manifest, outermost, which is where the flow begins:

    upper = waiting + tasks + results + rows    lower = rows + tasks + waiting

`submitted` stays what was sealed. A missing record is read both ways, each on the safe side: it may not be there yet
(all `n` wait), or not any more (the retry has ended, none waits). Only the opening of a retry flows backwards, from a
row to waiting. One that opens before the rows are read does no harm: `upper` has all its items as waiting. A reading
whose records are of a later retry than its rows is void, and read again.

*Cancellation.* Between the purge of a cancelled job's tasks and the rows that stand for them, the stored `cancelled`
event accounts for them: what is neither landed nor a result is still `queued`. The rows of what never ran bear no
shape: by shape they are what remains of what was submitted.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from headrace.completion.account_parts import (
    UNKNOWN_SHAPE,
    Intake,
    JobRow,
    Shapes,
    Side,
    by_number,
    number_of,
    summed,
)
from headrace.completion.counting import Landed
from headrace.contracts.api import ShapeAccount


class Reading(Struct, frozen=True):
    """One sandwich; `leased` by shape, `landed` where the outcomes were counted anew."""

    row: JobRow
    landed: Landed | None
    first: Side
    last: Side
    leased: Shapes

    @property
    def rows(self) -> int:
        """Indices that have their current outcome."""
        return self.row.landed if self.landed is None else self.landed.indices

    @property
    def submitted(self) -> int:
        """Items of the job."""
        return self.last.intake.stored

    @property
    def waiting(self) -> int:
        """Items of a retry that are not known to be stored again."""
        return self._waiting(self.first.intake, missing=self.row.retry_items)

    @property
    def void(self) -> bool:
        """Whether a retry was opened while this was read."""
        return max(self.first.intake.generation, self.last.intake.generation) > self.row.generation

    @property
    def excess(self) -> int:
        """By how much rows and tasks, but for leased ones, are more than was submitted."""
        last = self.last
        lower = self.rows + last.all_tasks + self._waiting(last.intake, missing=0)
        return max(0, lower - min(sum(self.leased.values()), last.all_tasks) - last.intake.stored)

    @property
    def balanced(self) -> bool:
        """Whether this reading is consistent with every stored item being somewhere exactly once."""
        first = self.first
        upper = self.waiting + first.all_tasks + first.results + self.rows
        enough = self.row.state == "cancelling" or first.intake.stored <= upper
        return not self.void and enough and not self.excess and self._counters_agree and self._shapes_balance

    # --- the account ---------------------------------------------------------------------------------
    def shapes(self) -> list[ShapeAccount]:
        """The account of each shape, one row `?` where they are not known. If it balances, so does each row.

        If it does not, the raw numbers are given: such an account must not look as if it did.
        """
        shapes = self.last.intake.shapes
        if self.landed is None or not self._knows_shapes(self.last.intake):
            accounts = [self._account(UNKNOWN_SHAPE, self.submitted)] if self.submitted or self.rows else []
        else:
            names = sorted({*shapes, *self.last.tasks, *self._rows_by_shape()}, key=by_number)
            accounts = [self._account(name, shapes.get(name, 0)) for name in names]
        return self._shared_out(accounts) if self.balanced else accounts

    def total(self) -> ShapeAccount:
        """The account of all items; the sum of the shapes' where it balances."""
        if self.balanced:
            return summed(self.shapes())
        raw = self._account(UNKNOWN_SHAPE, self.submitted)
        return replace(raw, queued=raw.queued + self.waiting)

    def _account(self, shape: str, submitted: int) -> ShapeAccount:
        """The raw numbers of one shape, or of all."""
        if shape == UNKNOWN_SHAPE:
            row, tasks, results = self.row, self.last.all_tasks, self.last.results
            return ShapeAccount(
                shape=shape, submitted=submitted, ok=row.ok, failed=row.failed, dead=row.dead,
                cancelled=row.cancelled, queued=tasks, landing=results,
            )  # fmt: skip
        found = {} if self.landed is None else self.landed.counts
        n = {
            status: found.get((number_of(shape), status), 0)
            for status in ("ok", "failed", "dead", "cancelled")
        }
        return ShapeAccount(shape=shape, submitted=submitted, queued=self.last.tasks.get(shape, 0), **n)

    def _shared_out(self, accounts: list[ShapeAccount]) -> list[ShapeAccount]:
        """Give each shape its part of what names none: results, items that wait, rows that a cancellation filled in.

        Each goes where there is room for it, so every row keeps the law.
        """
        alone = len(accounts) == 1 and accounts[0].shape == UNKNOWN_SHAPE
        unshaped = 0 if alone or self.landed is None else self.landed.counts.get((None, "cancelled"), 0)
        cancelling = self.row.state == "cancelling"
        later = self.last.results if cancelling else self.waiting
        shared: list[ShapeAccount] = []
        for a in accounts:
            left = max(0, a.submitted - a.ok - a.failed - a.dead - a.cancelled)
            cancelled = min(unshaped, left)
            queued = min(a.queued, left - cancelled)
            more = min(later, left - cancelled - queued)
            unshaped, later = unshaped - cancelled, later - more
            rest = left - cancelled - queued - more
            # `more` is what is landing of a job that is being cancelled, and what waits of a retry.
            queued, landing = (queued + rest, more) if cancelling else (queued + more, rest)
            shared.append(
                ShapeAccount(
                    shape=a.shape,
                    submitted=a.submitted,
                    ok=a.ok,
                    failed=a.failed,
                    dead=a.dead,
                    cancelled=a.cancelled + cancelled,
                    queued=queued,
                    landing=landing,
                )
            )
        return shared

    # --- the parts of the law ------------------------------------------------------------------------
    def _waiting(self, intake: Intake, *, missing: int) -> int:
        row = self.row
        if row.generation == 1 or row.state != "sealed":
            return 0
        if intake.generation != row.generation:
            return missing
        return max(0, row.retry_items - intake.again)

    @property
    def _counters_agree(self) -> bool:
        landed, row = self.landed, self.row
        if landed is None:
            return True
        mine = (row.landed, row.ok, row.failed, row.dead, row.cancelled)
        return mine == (landed.indices, *(landed.of(s) for s in ("ok", "failed", "dead", "cancelled")))

    @property
    def _shapes_balance(self) -> bool:
        if self.landed is None:
            return True
        first, last = self.first, self.last
        if self._knows_shapes(first.intake) and self.row.state != "cancelling":
            rows = self._rows_by_shape()
            lacking = sum(
                max(0, n - first.tasks.get(shape, 0) - rows.get(shape, 0))
                for shape, n in first.intake.shapes.items()
            )
            unshaped = self.landed.counts.get((None, "cancelled"), 0)
            if lacking > self.waiting + first.results + unshaped:
                return False
        return not self._knows_shapes(last.intake) or not self._too_much

    @property
    def _too_much(self) -> bool:
        """Whether a shape has more rows and tasks, but for leased ones, than were submitted of it."""
        rows, tasks, submitted = self._rows_by_shape(), self.last.tasks, self.last.intake.shapes
        return any(
            rows.get(shape, 0) + max(0, tasks.get(shape, 0) - self.leased.get(shape, 0))
            > submitted.get(shape, 0)
            for shape in {*rows, *tasks}
        )

    def _knows_shapes(self, intake: Intake) -> bool:
        """Whether producer and outcomes both say what shape each item has; only `cancelled` ones may lack it.

        Since the items of a retry ran first, their function may have been registered with other shapes.
        """
        counts = {} if self.landed is None else self.landed.counts
        nameless = any(shape is None and status != "cancelled" for shape, status in counts)
        moved = self.row.generation > 1 and self._too_much
        return not nameless and not moved and sum(intake.shapes.values()) == intake.stored

    def _rows_by_shape(self) -> dict[str, int]:
        rows: dict[str, int] = {}
        for (shape, _), n in ({} if self.landed is None else self.landed.counts).items():
            if shape is not None:
                rows[f"t{shape}"] = rows.get(f"t{shape}", 0) + n
        return rows
