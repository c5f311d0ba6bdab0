"""Finds custom ids that stand on two lines, over any number of lines with flat memory.

Sixteen bytes of a hash and the line's number are kept for each id, in 64 buckets that overflow to one
temporary file each; a bucket is compared by itself at the end. (With 10^9 ids the chance that two
different ones have one hash is below 10^-20.)
"""

from __future__ import annotations

import tempfile
from hashlib import blake2b
from typing import IO, Final, NamedTuple, Self

from headrace.contracts.errors import InvalidInput

_BUCKETS: Final = 64
"""As many files may be open, well below the default limit of descriptors (256 on a Mac)."""
_IN_MEMORY: Final = 1 << 17
"""Ids kept before the buckets go to their files: about 10 MiB."""
MAX_DUPLICATES: Final = 1_000_000
_LINE_BYTES: Final = 8
_RECORD: Final = 16 + _LINE_BYTES


class Duplicate(NamedTuple):
    """`line` repeats the id of line `first`."""

    line: int
    first: int


class DuplicateFinder:
    """`add` each id, then `find`. A context manager: it removes its files."""

    def __init__(self, *, in_memory: int = _IN_MEMORY) -> None:
        self._buckets = [bytearray() for _ in range(_BUCKETS)]
        self._files: list[IO[bytes]] = []
        self._in_memory = in_memory
        self._held = 0

    def add(self, custom_id: str, line: int) -> None:
        """Remember the id of a line. Lines must come in rising order."""
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._buckets[digest[0] & 63] += digest + line.to_bytes(_LINE_BYTES, "big")
        self._held += 1
        if self._held >= self._in_memory:
            self._spill()

    def _spill(self) -> None:
        if not self._files:
            self._files = [_open_file() for _ in range(_BUCKETS)]
        for bucket, file in zip(self._buckets, self._files, strict=True):
            file.write(bucket)
            bucket.clear()
        self._held = 0

    def find(self) -> list[Duplicate]:
        """Every repeat in the order of lines; raise `InvalidInput` if there are more than a million."""
        found: list[Duplicate] = []
        for n, bucket in enumerate(self._buckets):
            data = bytes(bucket)
            if self._files:
                self._files[n].seek(0)
                data = self._files[n].read() + data
            first: dict[bytes, int] = {}
            for at in range(0, len(data), _RECORD):
                digest = data[at : at + 16]
                line = int.from_bytes(data[at + 16 : at + _RECORD], "big")
                seen = first.setdefault(digest, line)
                if seen != line:
                    found.append(Duplicate(line, seen))
            if len(found) > MAX_DUPLICATES:
                msg = f"more than {MAX_DUPLICATES:,} lines repeat a custom_id; the first on line {min(found).line}"
                raise InvalidInput(msg, field="custom_id", line=min(found).line, code="duplicates")
        found.sort()
        return found

    def close(self) -> None:
        """Remove the files; safe to call twice."""
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_file() -> IO[bytes]:
    """A file that is gone when it is closed, or when the process dies."""
    return tempfile.TemporaryFile(prefix="headrace-ids-", buffering=0)
