"""What is wrong with a line of input: its number, the field, one sentence. Never the payload itself.

msgspec's errors name a path in the document; here they become a field as the user wrote it, with the
offending value where that is short.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.contracts.errors import InvalidInput

MAX_REPORTED: Final = 1_000
"""Errors kept of one input; the rest are counted."""
MAX_SHOWN: Final = 40
"""Characters of a value that an error may quote."""

_AT = re.compile(r" - at `(?:key` in `)?\$?\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?= - at|$)", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class LineError(Struct, frozen=True):
    """One refused line: `line` counts from 1, `field` is a path (`body.max_tokens`) or empty for the whole line."""

    line: int
    field: str
    error: str


class InvalidLines(InvalidInput):
    """Lines of the input are wrong, and nothing was stored.

    `errors` holds the first 1,000 in the order of the lines; `total` counts all of them.
    """

    code = "invalid_lines"

    def __init__(self, errors: list[LineError], total: int) -> None:
        first = errors[0]
        more = f" (and {total - 1:,} more)" if total > 1 else ""
        where = f", field {first.field}" if first.field else ""
        super().__init__(
            f"{total:,} bad line{'s' if total > 1 else ''}, nothing was stored: "
            f"line {first.line}{where}: {first.error}{more}",
            field=first.field or None,
            line=first.line,
        )
        self.errors = errors
        self.total = total


def shown(value: object) -> str:
    """`value` for an error text: whole if it is a short scalar, cut if it is a long one, else its kind.

    >>> shown(50000), shown("a" * 60), shown([1, 2])
    ('50000', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'", 'an array of 2')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else repr(value[:MAX_SHOWN] + "…")
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return "a very large integer"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return "an object"


def wrong(field: str, text: str) -> InvalidInput:
    """The error of one field; the line is added by whoever knows it."""
    return InvalidInput(text, field=field)


def from_msgspec(error: Exception, raw: bytes) -> InvalidInput:
    """The `error` of msgspec about the document `raw` as an error of a field."""
    if not isinstance(error, msgspec.ValidationError):
        if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
            return wrong("", "the line is not UTF-8")
        if isinstance(error, RecursionError):
            return wrong("", "the JSON is nested too deeply")
        return wrong("", f"not JSON: {str(error)[:200]}")
    text = str(error)
    at = _AT.search(text)
    path = at["path"] if at else ""
    path = path if path.strip("[.]") else ""  # `[...][...]`: somewhere in it
    said = text[: at.start()] if at else text
    named = _UNKNOWN.match(said) or _MISSING.match(said)
    if named:
        kind = "unknown field" if said.startswith("Object contains") else "missing field"
        name = named["name"]
        name = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…"
        return wrong(f"{path}.{name}".lstrip("."), f"{kind} {name!r}")
    return wrong(path, _plain(said[:300]) + _value_at(raw, path, said))


def _plain(said: str) -> str:
    """What msgspec says, in JSON's terms."""
    if said.startswith("Invalid enum value"):
        return "not one of the values that it can have"  # msgspec quotes all of what it got
    said = said.replace("Expected", "expected").replace("`", "")
    for python, json_ in (("str", "string"), ("int", "integer"), ("float", "number"), ("bool", "boolean")):
        said = re.sub(rf"\b{python}\b", json_, said)
    return said


def _value_at(raw: bytes, path: str, said: str) -> str:
    """`, got -5` for a bound that a short value breaks; nothing if the text says it, or the value is no scalar."""
    if "got" in said or not path or path.endswith("[...]"):
        return ""
    try:
        value: Any = msgspec.json.decode(raw)
        for name, index in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f", got {shown(value)}" if not isinstance(value, dict | list) else ""
