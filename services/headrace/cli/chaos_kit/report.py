"""What a run ends with: the list of what was done, and the proof."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.cli.chaos_kit.faults import Done
from headrace.cli.chaos_kit.plan import COMPONENTS
from headrace.cli.chaos_kit.verdict import Verdict
from headrace.cli.output import clock_text, print_line, print_table
from headrace.contracts.api import JobAudit

DELIVERY_FAULTS: Final = ("delay", "duplicate", "disk-full", "queue-full")


class Report(Struct, frozen=True, kw_only=True):
    """What came of a run. `seconds` from the start of the submit to the end of the job; `audit` is the one at rest.

    `left_out` are faults that could not be done when they were due: nothing waited that could be delayed, say.
    """

    seed: int
    seconds: float
    verdict: Verdict
    audit: JobAudit | None
    balanced_samples: int
    unbalanced: list[JobAudit]
    unanswered_samples: int
    faults: list[Done]
    submits: int
    left_out: int = 0
    not_back: list[str] = []

    @property
    def unbalanced_samples(self) -> int:
        """Samples whose account did not balance."""
        return len(self.unbalanced)

    def problems(self) -> list[str]:
        """What is wrong, a sentence each; none if everything that was promised holds."""
        v, a = self.verdict, self.audit
        found = [
            (v.lost, f"{v.lost:,} items are lost"),
            (v.not_stored, f"{v.not_stored:,} items were not stored: the submit did not finish in time"),
            (v.doubled, f"{v.doubled:,} outcomes are doubled"),
            (v.mismatched, f"{v.mismatched:,} outcomes do not belong to their line"),
            (self.unbalanced_samples, f"{self.unbalanced_samples} samples of the account did not balance"),
            (self.not_back, f"{', '.join(self.not_back)} did not come back"),
            (v.tasks_left + v.results_left, f"{v.tasks_left + v.results_left:,} items had not ended in time"),
            (v.dead_letters, f"{v.dead_letters:,} messages were dead-lettered"),
            (v.completed_events != 1, f"the job was said to have ended {v.completed_events} times"),
            (a is None, "the account could not be read at the end"),
        ]
        if a is not None:
            found.append((not a.balanced, "the account does not balance at the end"))
            found.append((bool(a.missing), f"the audit misses {a.missing[:5]}"))
            told, counted = (a.ok, a.failed, a.dead, a.cancelled), (v.ok, v.failed, v.dead, v.cancelled)
            found.append((told != counted, f"the account says {told}, the rows {counted}"))
        return [text for wrong, text in found if wrong]

    def summary(self) -> dict[str, Any]:
        """The report for scripts."""
        v, a = self.verdict, self.audit
        each = Counter(done.fault for done in self.faults)
        return {
            "seed": self.seed,
            "kills": self._by_component("kill"),
            "pauses": self._by_component("pause"),
            "items": v.items,
            "ok": v.ok,
            "failed": v.failed,
            "dead": v.dead,
            "cancelled": v.cancelled,
            "lost": v.lost,
            "doubled": v.doubled,
            "mismatched": v.mismatched,
            "not_stored": v.not_stored,
            "balanced": a is not None and a.balanced,
            "balanced_samples": self.balanced_samples,
            "unbalanced_samples": self.unbalanced_samples,
            "unanswered_samples": self.unanswered_samples,
            "state": a.state if a is not None else "unknown",
            "duplicates": a.duplicates if a is not None else 0,
            "submits": self.submits,
            "left_out": self.left_out,
            "seconds": round(self.seconds, 2),
            **{name.replace("-", "_"): each[name] for name in DELIVERY_FAULTS},
            "missing": v.missing,
            "problems": self.problems(),
            "examples": v.examples,
            "faults": msgspec.to_builtins(self.faults),
            "unbalanced": msgspec.to_builtins(self.unbalanced[:5]),
        }

    def _by_component(self, kind: str) -> dict[str, int]:
        found = Counter(component(d.victim) for d in self.faults if d.fault == kind)
        return {name: found[name] for name in COMPONENTS}


def component(victim: str) -> str:
    """The kind of process that a victim is."""
    return "worker" if victim.startswith("worker-") else victim


def print_report(report: Report) -> None:
    """Tables on standard output: faults, what broke by component, the proof, the verdict."""
    summary = report.summary()
    print_table(
        ("at s", "fault", "victim", "pid", "for s", "messages", ""),
        [
            (d.at_s, d.fault, d.victim, str(d.pid or ""), d.seconds or None, d.count or None, d.note)
            for d in report.faults
        ],
        title=f"What was done (seed {report.seed})",
    )
    print_line("")
    print_table(
        ("component", "killed", "paused"),
        [(name, summary["kills"][name], summary["pauses"][name]) for name in COMPONENTS],
        title="How often",
    )
    print_line(", ".join(f"{name}: {summary[name.replace('-', '_')]}" for name in DELIVERY_FAULTS))
    print_line("")
    columns = ("items", "ok", "failed", "dead", "cancelled", "lost", "doubled", "mismatched")
    columns += ("balanced_samples", "unbalanced_samples", "unanswered_samples", "duplicates")
    print_table(
        [name.replace("_", " ") for name in columns],
        [[summary[name] for name in columns]],
        title=f"What is there after {clock_text(report.seconds)}, counted in the data plane ({summary['state']})",
    )
    problems = report.problems()
    print_line("")
    for line in report.verdict.examples[:10]:
        print_line(line)
    print_line("NOT as promised: " + "; ".join(problems) if problems else "nothing lost, nothing doubled")
