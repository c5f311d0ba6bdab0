"""Every exit code of the command in one table; `--help` and docs/cli.md print it."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from headrace.contracts.errors import HeadraceError, InvalidInput


class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    INVALID = 2
    ITEMS_FAILED = 3
    CANCELLED = 4
    NOT_FOUND = 4
    TIMED_OUT = 5
    REFUSED = 5
    IN_DOUBT = 6
    KEY_REUSED = 7
    IN_PROGRESS = 8
    INTERRUPTED = 130


MEANINGS: Final[dict[Exit, str]] = {
    Exit.OK: "done, and everything that was asked holds",
    Exit.FAILED: "not done: no mesh, broker or service trouble, a conflict, an audit or a check that does not hold",
    Exit.INVALID: "wrong usage, or bad input (`submit` names each line)",
    Exit.ITEMS_FAILED: "`watch`, `demo`, `run`: the job ended, and some of its items are failed or dead",
    Exit.CANCELLED: "`watch`, `demo`: the job was cancelled, or ended by its deadline or its failure limit; `calls`, "
    "`budget`: there is no such call or budget",
    Exit.TIMED_OUT: "`watch --timeout`: the job had not ended in that time (it goes on); `call`: refused, by policy or "
    "for lack of budget",
    Exit.IN_DOUBT: "`call`: in doubt: the callee may have done it, and nobody knows yet",
    Exit.KEY_REUSED: "`call`, `agent ask`: the key or request was used with another body",
    Exit.IN_PROGRESS: "`call`: still in progress, or waiting for approval",
    Exit.INTERRUPTED: "Ctrl-C; what was stored stays stored",
}

_UNKNOWN: Final = frozenset({"unknown_call", "unknown_budget"})

EPILOG: Final = "Exit codes:\n\n" + "\n\n".join(
    f"{int(code):>3}  {meaning}" for code, meaning in MEANINGS.items()
)


def exit_code_of(error: HeadraceError) -> Exit:
    """The exit code of a command that ends with `error`."""
    if error.code in _UNKNOWN:
        return Exit.NOT_FOUND
    return Exit.INVALID if isinstance(error, InvalidInput) else Exit.FAILED
