"""What `audit` shows: the account by shape, live on a terminal, a line for each sample elsewhere, tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from headrace.cli.live_view import LiveView
from headrace.cli.output import print_table, say
from headrace.cli.status import print_status
from headrace.contracts.api import JobAudit, ShapeAccount, TenantAudit

if TYPE_CHECKING:
    from rich.console import RenderableType

LAW: Final = ("submitted", "ok", "failed", "dead", "cancelled", "queued", "landing")
SHOWN_RANGES: Final = 20


class AuditView(LiveView):
    """Shows each sample on standard error; used as a context so that the terminal is left in order.

    `quiet` shows troubles only: the samples themselves are printed as JSON.
    """

    def __init__(self, *, quiet: bool = False, live: bool | None = None) -> None:
        super().__init__(live=False if quiet else live)
        self._quiet = quiet

    def show(self, found: JobAudit | TenantAudit) -> None:
        """One sample."""
        if self._live is not None:
            self._live.update(account_table(found), refresh=True)
        elif not self._quiet:
            say(line(found))


def line(found: JobAudit | TenantAudit) -> str:
    """A sample in one line: the law with its numbers."""
    right = " + ".join(f"{name} {getattr(found, name):,}" for name in LAW[1:])
    return f"{_head(found)}: submitted {found.submitted:,} = {right}: {_verdict(found)}"


def account_table(found: JobAudit | TenantAudit) -> RenderableType:
    """A sample as the live view draws it: a row for each shape, their sum, the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("shape")
    for name in LAW:
        table.add_column(name, justify="right")
    for account in found.shapes:
        table.add_row(account.shape, *(f"{getattr(account, name):,}" for name in LAW))
    table.add_section()
    table.add_row("all", *(f"{getattr(found, name):,}" for name in LAW), style="bold")
    verdict = Text(_verdict(found), style="green" if found.balanced else "bold red")
    return Group(Text(f"{_head(found)}  ").append_text(verdict), table)


def print_audit(found: JobAudit) -> None:
    """The account of a job, its shapes, its sources and its verdict on standard output."""
    print_status(found)
    _print_shapes(found.shapes)
    sources = found.sources
    print_table(
        ("source", "says", "value"),
        [
            ("manifest", "stored", sources.manifest_stored),
            ("manifest", "closed", sources.manifest_closed or "open"),
            ("broker", "tasks", sources.tasks_in_broker),
            ("broker", "results", sources.results_in_broker),
            ("data plane", "rows landed", sources.rows_landed),
            ("data plane", "distinct indices", sources.distinct_indices),
        ],
    )
    print_table(
        ("audit", _verdict(found)),
        [("missing", ranges_text(found.missing)), ("doubled", ranges_text(found.doubled))],
    )


def print_tenant(found: TenantAudit) -> None:
    """The account of all jobs on standard output."""
    print_table(
        ("jobs", f"{found.jobs:,}"),
        [("not ended", found.open_jobs), *((name, getattr(found, name)) for name in (*LAW, "duplicates"))],
    )
    _print_shapes(found.shapes)
    print_table(
        ("audit", _verdict(found)), [("jobs that do not balance", ", ".join(found.unbalanced) or "none")]
    )


def ranges_text(ranges: Sequence[tuple[int, int]]) -> str:
    """Inclusive ranges for people: `3-5, 19`; the first of many."""
    shown = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in ranges[:SHOWN_RANGES])
    more = f", and {len(ranges) - SHOWN_RANGES} more ranges" if len(ranges) > SHOWN_RANGES else ""
    return f"{shown}{more}" or "none"


def _print_shapes(shapes: Sequence[ShapeAccount]) -> None:
    print_table(("shape", *LAW), [(a.shape, *(getattr(a, name) for name in LAW)) for a in shapes])


def _head(found: JobAudit | TenantAudit) -> str:
    if isinstance(found, JobAudit):
        return f"{found.job} {found.state}"
    return f"{found.jobs:,} jobs, {found.open_jobs:,} not ended"


def _verdict(found: JobAudit | TenantAudit) -> str:
    return "balanced" if found.balanced else "NOT balanced"
