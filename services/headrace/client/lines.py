"""A stream of bytes as numbered lines, in blocks, with flat memory whatever the size of file or line."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from headrace.contracts.errors import InvalidInput

CHUNK: Final = 1 << 20
"""Bytes read at once."""
MAX_LINE: Final = 64 << 20
"""Longest line that is read, in bytes; a longer one is skipped and reported by its number."""

_BOM: Final = b"\xef\xbb\xbf"
_OTHER_BOMS: Final = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class Block(NamedTuple):
    """Lines in a row: `lines[i]` has number `numbers[i]` (from 1). None stands for a line over the bound.

    Blank lines are among them: they count, and whoever reads skips them. A trailing carriage return is
    kept, since it is white space to JSON.
    """

    numbers: Sequence[int]
    lines: Sequence[bytes | None]


@contextmanager
def readable(name: str) -> Generator[None]:
    """Raise `InvalidInput` (`unreadable`) for what the system says while the input `name` is read."""
    try:
        yield
    except OSError as e:
        msg = f"{name[:200]} cannot be read: {e.strerror or e}"
        raise InvalidInput(msg, code="unreadable") from None


def split_lines(
    read: Callable[[int], bytes], *, max_line: int = MAX_LINE, chunk: int = CHUNK
) -> Iterator[Block]:
    """Blocks of the lines that `read(n)` gives, without their line breaks; a byte order mark is dropped.

    Raise `InvalidInput` for UTF-16. The last line needs no line break.
    """
    number = 1
    data = _without_bom(read(chunk)) or read(chunk)
    rest: list[bytes] = []  # the line that began in earlier chunks
    size = 0
    while data:
        first, *others = data.split(b"\n")
        size += len(first)
        if size <= max_line:
            rest.append(first)
        else:
            rest.clear()  # never held: only its size is remembered
        if others:
            lines: list[bytes | None] = [b"".join(rest) if size <= max_line else None, *others]
            last = others[-1]
            lines.pop()
            yield Block(range(number, number + len(lines)), lines)
            number += len(lines)
            rest, size = [last], len(last)
        data = read(chunk)
    if size:
        yield Block(range(number, number + 1), [b"".join(rest) if size <= max_line else None])


def _without_bom(data: bytes) -> bytes:
    encoding = _OTHER_BOMS.get(data[:2])
    if encoding:
        msg = f"the input is {encoding}: save it as UTF-8"
        raise InvalidInput(msg, line=1, code="not_utf8")
    return data.removeprefix(_BOM)
