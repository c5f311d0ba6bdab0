"""The tables of docs/doctor.md: the rules of streams and consumers as the code has them. What stands above stays."""

from __future__ import annotations

from pathlib import Path

from headrace.mesh.checks.consumer_rules import CONSUMER_RULES
from headrace.mesh.checks.stream_rules import STREAM_RULES

MARKER = "<!-- below this line: python docs/generate.py, from services/headrace/mesh/checks -->\n"


def doctor_text(page: Path) -> str:
    """The page with its tables made anew."""
    written, marker, _ = page.read_text("utf-8").partition(MARKER)
    lines = ["## Streams", ""]
    lines += ["What a setting does that is not as it should be. No service starts where it stops work.", ""]
    lines += ["| setting | what it does | state | stops work |", "|---|---|---|---|"]
    for rule in STREAM_RULES:
        lines.append(f"| `{rule.setting}` | {rule.found} | `{rule.state}` | {'yes' if rule.stops else ''} |")
    lines += ["", "## Consumers", "", "| setting | what it does | state |", "|---|---|---|"]
    lines += [f"| `{rule.setting}` | {rule.found} | `{rule.state}` |" for rule in CONSUMER_RULES]
    return written + marker + "\n" + "\n".join(lines) + "\n"
