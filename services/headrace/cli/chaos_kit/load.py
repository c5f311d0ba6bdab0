"""The user's input as the file that is submitted: repeated or cut to a number of items, each with its own custom id.

The ids make the proof stronger: an outcome must bear the id of the line that stands at its index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.client.inputs import InputFormat, open_input
from headrace.contracts.errors import InvalidInput

LOOKED_AT: Final = 2_000
"""Lines whose token limits are read to know how long the job will take."""
DEFAULT_MAX_TOKENS: Final = 256


class Source(Struct, frozen=True, kw_only=True):
    """Where the lines come from, in the words of `headrace submit`."""

    file: str
    input_format: InputFormat = "auto"
    column: str | None = None
    id_column: str | None = None
    rows: bool = False


class Load(Struct, frozen=True, kw_only=True):
    """A prepared input: `items` lines at `path`, `size` bytes; line i repeats line i modulo `distinct`.

    `limits` are the token limits of its first lines.
    """

    path: Path
    items: int
    distinct: int
    size: int
    rows: bool = False
    limits: list[int] = []


class _Id(Struct):
    custom_id: str | UnsetType | None = UNSET


class _Limits(Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    body: _Limits | None = None


_id_of = msgspec.json.Decoder(_Id).decode
_limits_of = msgspec.json.Decoder(_Limits).decode
_any_of = msgspec.json.Decoder(dict[str, Any]).decode


def prepare(source: Source, path: Path, *, items: int | None = None) -> Load:
    """Write the lines of `source` to `path`, repeated or cut to `items` of them (as many as there are by default).

    Lines that are wrong stay as they are, and at their number: the submit names them. Raise `InvalidInput` for an
    input without a line, and what `open_input` raises.
    """
    written = distinct = 0
    limits: list[int] = []
    with (
        open_input(
            source.file, input_format=source.input_format, column=source.column, id_column=source.id_column
        ) as opened,
        path.open("wb") as out,
    ):
        while items is None or written < items:
            again = written > 0
            for raw in _lines(opened.lines.blocks()):
                if items is not None and written >= items:
                    break
                if not raw.strip():
                    if not again:
                        out.write(b"\n")
                    continue
                if len(limits) < LOOKED_AT:
                    limits.append(_limit(raw))
                _write(out, raw if source.rows else with_id(raw, written, repeated=again))
                written += 1
            if not written:
                msg = f"{opened.name} has no line: there is nothing to run"
                raise InvalidInput(msg, field="file")
            distinct = distinct or written
            if items is None:
                break
    return Load(
        path=path,
        items=written,
        distinct=distinct,
        size=path.stat().st_size,
        rows=source.rows,
        limits=limits,
    )


def with_id(raw: bytes, index: int, *, repeated: bool = False) -> bytes:
    """The line with a custom id of its own: the one that it has, with the index behind it once it is repeated."""
    text = raw.strip()
    try:
        found = _id_of(text).custom_id
        if isinstance(found, str):
            if not repeated:
                return text
            line = _any_of(text)
            line["custom_id"] = f"{found}-{index}"
            return msgspec.json.encode(line)
        if found is None:
            return text
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    rest = text[1:].lstrip()
    return b'{"custom_id":"chaos-%d"%b%b' % (index, b"" if rest.startswith(b"}") else b",", rest)


def lines_of(load: Load) -> Iterator[bytes]:
    """The items of a prepared input, in the order of their index."""
    with load.path.open("rb") as file:
        for raw in file:
            if raw.strip():
                yield raw


def mean_tokens(limits: list[int], *, median: float, sigma: float) -> float:
    """Mean length of log-normal answers that end at these limits."""
    if not limits:
        return median
    mu = math.log(median)

    def capped(limit: int) -> float:
        at = (math.log(max(1, limit)) - mu) / sigma
        below = math.exp(mu + sigma**2 / 2) * _normal(at - sigma)
        return below + limit * (1 - _normal(at))

    return sum(map(capped, limits)) / len(limits)


def _normal(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _limit(raw: bytes) -> int:
    try:
        found = _limits_of(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return DEFAULT_MAX_TOKENS
    inner = found.body or found
    return inner.max_tokens or inner.max_completion_tokens or DEFAULT_MAX_TOKENS


def _lines(blocks: Any) -> Iterator[bytes]:
    for block in blocks:
        for number, raw in zip(block.numbers, block.lines, strict=True):
            if raw is None:
                msg = f"line {number} is too long to be read"
                raise InvalidInput(msg, line=number)
            yield raw


def _write(out: IO[bytes], line: bytes) -> None:
    out.write(line.strip() + b"\n")
