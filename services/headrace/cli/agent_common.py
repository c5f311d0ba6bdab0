"""What the commands of `headrace agent` share: names, bodies, and the exit codes of what a mailbox refuses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Raw

from headrace.cli.exit_codes import Exit
from headrace.cli.failures import report
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Refused
from headrace.contracts.names import check_token

AgentName = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.", show_default=False)]


@contextlib.contextmanager
def refusals_told(*, json: bool) -> Generator[None]:
    """Exit code 4 for what is not there, 5 for what is refused, 7 for a request's id that is another's."""
    try:
        yield
    except NotFound as e:
        if e.code not in ("unknown_agent", "unknown_request"):
            raise
        report(e, as_json=json)
        raise typer.Exit(Exit.NOT_FOUND) from None
    except Conflict as e:
        if e.code != "request_reused":
            raise
        report(e, as_json=json)
        raise typer.Exit(Exit.KEY_REUSED) from None
    except Refused as e:
        report(e, as_json=json)
        raise typer.Exit(Exit.REFUSED) from None


def agent_name(name: str) -> str:
    """`name`, checked."""
    return check_token("agent", name)


def read_text(text: str) -> bytes:
    """The argument itself, the file behind `@`, or standard input for `-`."""
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as e:
            raise InvalidInput(f"cannot read {text[1:]}: {e.strerror or e}", field="body") from None
    return text.encode()


def read_json(text: str) -> Raw:
    """JSON as it is given, read as `read_text` does."""
    data = read_text(text)
    try:
        data.decode()
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidInput(f"--body is no JSON: {str(e)[:200]}", field="body", code="invalid_json") from None
    return Raw(data)


def checked(kind: str, value: str, type_: Any) -> str:
    """`value` if it keeps to the bounds of `type_`; raise `InvalidInput` naming it."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError:
        msg = f"{kind} {value[:80]!r} is not valid: use 1 to 128 of the characters A-Z a-z 0-9 _ . -"
        raise InvalidInput(msg, field=kind, code="invalid_name") from None
