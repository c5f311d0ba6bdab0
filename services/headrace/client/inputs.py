"""Where the lines of a job come from: a file (plain or gzip), standard input, a table, or an iterable.

An input is read twice, once to check everything and once to store it, so what cannot be read twice is
spooled to a temporary file first.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Protocol, Self

from headrace.client.lines import MAX_LINE, Block, readable, split_lines
from headrace.client.spool import Rows, Spool, spool_rows, spool_stream
from headrace.client.tables import CsvInput, ParquetInput
from headrace.contracts.errors import Conflict, InvalidInput, NotFound

InputFormat = Literal["auto", "jsonl", "csv", "parquet"]
SourceArgument = str | os.PathLike[str] | Rows

_GZIP: Final = b"\x1f\x8b"
_PARQUET: Final = b"PAR1"
_PACKED: Final = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}


class LineInput(Protocol):
    """What the two passes need of an input."""

    def blocks(self, digest: Hasher | None = None) -> Iterator[Block]:
        """The lines from the start; `digest` is fed with the content as it is read."""
        ...

    def position(self) -> int:
        """Bytes of the file that the running `blocks` has read, for progress."""
        ...


class Hasher(Protocol):
    """The part of `hashlib` that an input feeds."""

    def update(self, data: bytes, /) -> None:
        """Add `data`."""
        ...


class JsonlInput:
    """Lines of a file; gzip is recognised by its first bytes and may have several members."""

    def __init__(self, path: Path, *, max_line: int = MAX_LINE) -> None:
        self._path = path
        self._max_line = max_line
        self._file: io.BufferedReader | None = None
        self._read = 0

    def blocks(self, digest: Hasher | None = None) -> Iterator[Block]:
        """The lines from the start; raise `InvalidInput` for what cannot be decompressed."""
        with readable(self._path.name), self._path.open("rb") as file:
            self._file = file
            packed = file.peek(2)[:2] == _GZIP
            stream = gzip.GzipFile(fileobj=file, mode="rb") if packed else file

            def read(size: int) -> bytes:
                data = stream.read(size)
                self._read = file.tell()
                if digest is not None:
                    digest.update(data)
                return data

            try:
                yield from split_lines(read, max_line=self._max_line)
            except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                msg = f"{self._path.name} is damaged gzip: {e}"
                raise InvalidInput(msg, code="bad_gzip") from None

    def position(self) -> int:
        """Bytes of the file that are read (compressed ones, for gzip)."""
        return self._read


class Input:
    """An opened input: `lines` to read, `total_bytes` for progress, `name` for people.

    Use it as a context manager: it removes the spool file. `check_unchanged` raises `Conflict` if the file is not
    the one that was opened: its items would not be those that were checked.
    """

    def __init__(self, lines: LineInput, path: Path, name: str, spool: Spool | None = None) -> None:
        self.lines = lines
        self.name = name
        self._path = path
        self._spool = spool
        self._stamp = _stamp(path)
        self.total_bytes = path.stat().st_size

    def check_unchanged(self) -> None:
        """Raise `Conflict` if the file was changed since it was opened."""
        with readable(self.name):
            same = _stamp(self._path) == self._stamp
        if not same:
            msg = f"{self.name} was changed while it was read: submit a file that stays as it is"
            raise Conflict(msg, code="input_changed")

    def close(self) -> None:
        """Remove the spool file, if there is one."""
        if self._spool is not None:
            self._spool.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_input(
    source: SourceArgument,
    *,
    input_format: InputFormat = "auto",
    column: str | None = None,
    id_column: str | None = None,
    max_line: int = MAX_LINE,
    whole_rows: bool = False,
) -> Input:
    """Open a path, `-` (standard input), or an iterable of dicts and strings.

    The format is told by the first bytes (gzip, Parquet) and the ending (`.csv`, `.tsv`, `.parquet`), unless
    given. Tables need the `column` that holds the prompts, or `whole_rows`. Raise `NotFound` or `InvalidInput`. What
    must be spooled takes its time.
    """
    if not isinstance(source, str | os.PathLike):
        spool = spool_rows(source, whole=whole_rows)
        return Input(JsonlInput(spool.path, max_line=max_line), spool.path, "rows", spool)
    name = os.fspath(source)
    with readable(name):
        return _open_path(name, input_format, column, id_column, max_line, whole_rows=whole_rows)


def _open_path(
    name: str,
    input_format: InputFormat,
    column: str | None,
    id_column: str | None,
    max_line: int,
    *,
    whole_rows: bool,
) -> Input:
    path, spool = (Path(name), None) if name != "-" else (Path(), spool_stream(sys.stdin.buffer.read))
    if spool is None:
        if not name or not path.exists():
            msg = f"there is no file {name or repr(name)}"
            raise NotFound(msg, code="no_file")
        if path.is_dir():
            msg = f"{name} is a folder: give one file"
            raise InvalidInput(msg, code="not_a_file")
        if not path.is_file():  # a pipe or device gives its bytes once
            with path.open("rb") as pipe:
                spool = spool_stream(pipe.read)
    kept = spool.path if spool else path
    try:
        lines = _reader(
            kept,
            path.suffixes if name != "-" else [],
            wanted=input_format,
            column=column,
            id_column=id_column,
            max_line=max_line,
            whole_rows=whole_rows,
        )
    except BaseException:
        if spool is not None:
            spool.remove()
        raise
    return Input(lines, kept, "standard input" if name == "-" else path.name, spool)


def _reader(
    path: Path,
    suffixes: list[str],
    *,
    wanted: InputFormat,
    column: str | None,
    id_column: str | None,
    max_line: int,
    whole_rows: bool,
) -> LineInput:
    with path.open("rb") as file:
        head = file.read(8)
    kind = wanted
    if kind == "auto":
        endings = {s.lower() for s in suffixes}
        tabular = "csv" if endings & {".csv", ".tsv"} else "parquet" if ".parquet" in endings else "jsonl"
        kind = "parquet" if head.startswith(_PARQUET) else tabular
    for magic, packing in _PACKED.items():
        if head.startswith(magic):
            msg = f"{path.name} is packed with {packing}: unpack it first (gzip is read as it is)"
            raise InvalidInput(msg, code="unknown_packing")
    if kind == "jsonl":
        if column or id_column:
            msg = "a column is only given for CSV and Parquet: JSON lines name their fields themselves"
            raise InvalidInput(msg, field="column")
        return JsonlInput(path, max_line=max_line)
    if not column and not whole_rows:
        msg = f"which column of the {kind} file holds the prompts? Name it with --column"
        raise InvalidInput(msg, field="column")
    if kind == "parquet":
        return ParquetInput(path, column or None, id_column)
    delimiter = "\t" if ".tsv" in (s.lower() for s in suffixes) else ","
    return CsvInput(path, column or None, id_column, delimiter=delimiter, packed=head.startswith(_GZIP))


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def new_digest() -> hashlib._Hash:  # pyright: ignore[reportPrivateUsage]
    """The hash that makes an input's fingerprint."""
    return hashlib.sha256()
