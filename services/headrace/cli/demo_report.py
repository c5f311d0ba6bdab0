"""What the demo ends with: the account, the rate, and three questions with their answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.output import clock_text, print_line, print_table
from headrace.contracts.api import JobAudit, ResultsReply, ResultsRequest

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

SAMPLES = 3
SHOWN_CHARACTERS = 280


class Sample(Struct, frozen=True):
    """A prompt and its answer."""

    custom_id: str
    prompt: str
    answer: str


class Report(Struct, frozen=True, kw_only=True):
    """What came of a demo; `seconds` run from the first submitted line to the last landed result."""

    audit: JobAudit
    seconds: float
    samples: list[Sample]
    exit: Exit

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second, end to end."""
        return self.audit.tokens_out / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """The report for scripts."""
        account: dict[str, Any] = msgspec.to_builtins(self.audit)
        samples = msgspec.to_builtins(self.samples)
        return account | {
            "seconds": round(self.seconds, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "samples": samples,
        }


def read_prompts(path: Path) -> dict[str, str]:
    """The last thing that is asked in each line of an OpenAI Batch file, by custom_id."""
    prompts: dict[str, str] = {}
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                entry = msgspec.json.decode(line)
                prompts[str(entry.get("custom_id", len(prompts)))] = _asked(entry)
    return prompts


async def pick_samples(mesh: Mesh, job: str, prompts: dict[str, str]) -> list[Sample]:
    """Three answered items, spread over the job; those that ended by themselves rather than at their limit."""
    page = await ask(mesh, "results", ResultsRequest(job=job, limit=200), ResultsReply)
    answered = [r for r in page.results if r.status == "ok" and r.choices and r.choices[0].text.strip()]
    whole = [r for r in answered if r.choices[0].finish_reason == "stop"]
    answered = whole if len(whole) >= SAMPLES else answered
    step = max(1, len(answered) // SAMPLES)
    return [
        Sample(
            r.custom_id or str(r.index),
            prompts.get(r.custom_id or str(r.index), ""),
            r.choices[0].text.strip(),
        )
        for r in answered[step // 2 :: step][:SAMPLES]
    ]


def print_report(report: Report, *, kept: Path | None) -> None:
    """Tables on standard output."""
    a = report.audit
    print_line("")
    print_table(
        ("submitted", "ok", "failed", "dead", "cancelled", "queued", "landing", "duplicates", "balanced"),
        [(a.submitted, a.ok, a.failed, a.dead, a.cancelled, a.queued, a.landing, a.duplicates, a.balanced)],
        title=f"The account of {a.job} ({a.state})",
    )
    print_line("")
    print_table(
        ("time", "tokens in", "tokens out", "tokens/s", "items/s"),
        [(clock_text(report.seconds), a.tokens_in, a.tokens_out, round(report.tokens_per_s, 1),
          round(a.submitted / max(report.seconds, 1e-9), 1))],
        title="Pace, from the first line submitted to the last result landed",
    )  # fmt: skip
    print_line("")
    print_table(
        ("item", "prompt", "answer"),
        [(s.custom_id, shorten(s.prompt), shorten(s.answer)) for s in report.samples],
        title="Three of the answers",
    )
    if kept is not None:
        print_line(
            f"\nkept in {kept}: `headrace up --dir {kept}`, then `headrace results {a.job} --dir {kept}`"
        )


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """`text` on one line, cut at a word."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


def _asked(entry: dict[str, Any]) -> str:
    body: dict[str, Any] = entry.get("body") or entry
    messages: list[dict[str, Any]] = body.get("messages") or []
    asked = messages[-1].get("content", "") if messages else body.get("prompt", "")
    return asked if isinstance(asked, str) else msgspec.json.encode(asked).decode()
