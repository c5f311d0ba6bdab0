"""CSV and Parquet as lines: one named column holds the prompts, another may hold the custom ids.

Each row becomes the plain line that it stands for, so that everything after this file knows one form. Other
columns stay behind; the custom id is what joins the results to them. Without a column, for a function over rows, each
row becomes an object of all its columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from headrace.client.lines import MAX_LINE, Block, readable
from headrace.contracts.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.client.inputs import Hasher

_ROWS: Final = 1_000
"""Rows of a block."""
_encode = msgspec.json.Encoder().encode


class CsvInput:
    """Rows of a CSV file with a header. A row's number is that of the line on which it begins."""

    def __init__(
        self, path: Path, column: str | None, id_column: str | None, *, delimiter: str, packed: bool
    ) -> None:
        self._path = path
        self._column = column
        self._id_column = id_column
        self._delimiter = delimiter
        self._packed = packed
        self._read = 0
        self._begins = 1

    def blocks(self, digest: Hasher | None = None) -> Iterator[Block]:
        """The rows from the start, as plain lines; an empty file has none."""
        csv.field_size_limit(MAX_LINE)
        with readable(self._path.name), self._path.open("rb") as file:
            stream = gzip.GzipFile(fileobj=file, mode="rb") if self._packed else file
            text = io.TextIOWrapper(cast("io.BufferedReader", stream), encoding="utf-8-sig", newline="")
            # Strict, since an open quote would else make one prompt of all that follows.
            reader = csv.reader(text, delimiter=self._delimiter, strict=True)
            try:
                header = next(reader, None)
                if header is not None:
                    if self._column is None:
                        _check_names(header, self._path.name)
                    at = None if self._column is None else _column(header, self._column, self._path.name)
                    id_at = _column(header, self._id_column, self._path.name) if self._id_column else None
                    yield from self._rows(reader, file, digest, header=header, at=at, id_at=id_at)
            except UnicodeDecodeError:
                msg = f"{self._path.name} is not UTF-8 after line {reader.line_num}"
                raise InvalidInput(msg, line=reader.line_num + 1, code="not_utf8") from None
            except csv.Error as e:
                msg = f"the row that begins on line {self._begins} is no CSV: {e}"
                raise InvalidInput(msg, line=self._begins) from None
            except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                msg = f"{self._path.name} is damaged gzip: {e}"
                raise InvalidInput(msg, code="bad_gzip") from None

    def _rows(
        self,
        reader: Any,
        file: io.BufferedReader,
        digest: Hasher | None,
        *,
        header: list[str],
        at: int | None,
        id_at: int | None,
    ) -> Iterator[Block]:
        width = len(header)
        numbers: list[int] = []
        lines: list[bytes | None] = []
        self._begins = reader.line_num + 1
        for row in reader:
            # A row that is too short has no such cell: as null it is refused with its line.
            cells = cast("list[str]", row)
            line: dict[str, Any] = (
                {name: cells[i] if i < len(cells) else None for i, name in enumerate(header)}
                if at is None
                else {"prompt": cells[at] if at < len(cells) else None}
            )
            if id_at is not None:
                line["custom_id"] = cells[id_at] if id_at < len(cells) else None
            if any(cells[width:]):  # perhaps a comma without quotes cut the prompt: a field that is refused
                line[f"cell {width + 1} of {width} columns"] = None
            numbers.append(self._begins)
            lines.append(_encode(line) if cells else b"")
            self._begins = reader.line_num + 1
            if len(lines) == _ROWS:
                self._read = file.tell()
                yield _block(numbers, lines, digest)
                numbers, lines = [], []
        self._read = file.tell()
        if lines:
            yield _block(numbers, lines, digest)

    def position(self) -> int:
        """Bytes of the file that are read."""
        return self._read


class ParquetInput:
    """Rows of a Parquet file, numbered from 1; needs the extra `parquet`.

    A column of strings holds prompts, one of integer lists token ids, one of lists of structs messages.
    """

    def __init__(self, path: Path, column: str | None, id_column: str | None) -> None:
        self._path = path
        self._column = column
        self._id_column = id_column
        self._read = 0

    def blocks(self, digest: Hasher | None = None) -> Iterator[Block]:
        """The rows from the start, as plain lines; memory is bounded by one batch of rows of the columns."""
        parquet = _pyarrow_parquet()
        try:
            file = parquet.ParquetFile(self._path)
        except (OSError, ValueError) as e:
            msg = f"{self._path.name} is no Parquet file: {str(e)[:200]}"
            raise InvalidInput(msg, code="bad_parquet") from None
        with file:
            names: list[str] = list(file.schema_arrow.names)
            if self._column is None:
                _check_names(names, self._path.name)
                columns, field = names, ""
            else:
                _column(names, self._column, self._path.name)
                columns = [self._column]
                field = _field_of(file.schema_arrow.field(self._column).type, self._column)
            if self._id_column:
                _column(names, self._id_column, self._path.name)
                columns = [*columns, self._id_column]
            total = max(1, int(file.metadata.num_rows))
            size = self._path.stat().st_size
            number = 1
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(dict.fromkeys(columns))):
                rows: list[dict[str, Any]] = (
                    batch.to_pylist()
                    if self._column is None
                    else [{field: value} for value in batch.column(self._column).to_pylist()]
                )
                if self._id_column:
                    for row, value in zip(rows, batch.column(self._id_column).to_pylist(), strict=True):
                        row["custom_id"] = value if value is None or isinstance(value, str) else str(value)
                self._read = size * (number + len(rows)) // (total + 1)
                yield _block(range(number, number + len(rows)), [_encode(row) for row in rows], digest)
                number += len(rows)

    def position(self) -> int:
        """Bytes of the file that are read, by the share of its rows."""
        return self._read


def _block(numbers: Any, lines: list[Any], digest: Hasher | None) -> Block:
    if digest is not None:
        digest.update(b"\n".join(lines) + b"\n")
    return Block(numbers, lines)


def _column(names: list[str], wanted: str, file: str) -> int:
    if names.count(wanted) == 1:
        return names.index(wanted)
    known = ", ".join(name[:40] for name in names[:20])
    problem = "has several columns" if wanted in names else "has no column"
    msg = f"{file} {problem} {wanted[:80]!r}; its columns: {known}"
    raise InvalidInput(msg, field="column", code="unknown_column")


def _check_names(names: list[str], file: str) -> None:
    """A row of all columns needs a name for each, once."""
    wrong = next((name for name in names if not name or names.count(name) > 1), None)
    if wrong is not None:
        problem = f"has several columns {wrong[:80]!r}" if wrong else "has a column without a name"
        msg = f"{file} {problem}: rows of all columns need one name for each"
        raise InvalidInput(msg, field="column", code="unknown_column")


def _field_of(kind: Any, column: str) -> str:
    """The field of a plain line that a Parquet type stands for."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return "prompt"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_integer(kind.value_type):
            return "prompt_token_ids"
        if types.is_struct(kind.value_type):
            return "messages"
    msg = f"column {column!r} has type {kind}: expected strings, lists of integers (token ids) or lists of messages"
    raise InvalidInput(msg, field="column", code="wrong_column_type")


def _pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        msg = "reading Parquet needs pyarrow: pip install 'headrace[parquet]'"
        raise InvalidInput(msg, code="missing_extra") from None
    return parquet
