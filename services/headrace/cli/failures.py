"""How an expected error ends a command: one line for people, one object for scripts, one exit code."""

from __future__ import annotations

from typing import Any

from headrace.cli.exit_codes import exit_code_of
from headrace.cli.output import print_json, say
from headrace.contracts.errors import HeadraceError, InvalidInput


def report(error: HeadraceError, *, as_json: bool) -> int:
    """Print `error` and return the exit code.

    Always `error: …` on standard error; with `--json` also `{"error": {"code", "message", …}}` on standard
    output, where a script that parses the answer finds it.
    """
    say(f"error: {error}")
    if as_json:
        print_json({"error": describe(error)})
    return int(exit_code_of(error))


def describe(error: HeadraceError) -> dict[str, Any]:
    """`error` as the front door would put it."""
    body: dict[str, Any] = {"code": error.code, "message": str(error)}
    if isinstance(error, InvalidInput):
        body |= {k: v for k, v in (("field", error.field), ("line", error.line)) if v is not None}
    return body
