"""Results as a file: JSON lines, OpenAI Batch output, or Parquet. The file appears whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

import msgspec

from headrace.client.openai_output import openai_line
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Result

ResultFormat = Literal["jsonl", "openai", "parquet"]
_ROW_GROUP: Final = 10_000
_ROW_GROUP_BYTES: Final = 64 << 20
_encode = msgspec.json.Encoder().encode


def jsonl_line(result: Result) -> dict[str, Any]:
    """One outcome, flat: what most readers want of it.

    `output` is the text of the first completion, or the value of a function over a row. All completions stand in
    `choices` if there are several, or if one has more than text (log probabilities, tool calls).
    """
    first = result.choices[0] if result.choices else None
    usage = result.usage
    line: dict[str, Any] = {
        "index": result.index,
        "custom_id": result.custom_id,
        "status": result.status,
        "output": (first.text if first else None)
        if isinstance(result.value, msgspec.UnsetType)
        else result.value,
        "finish_reason": first.finish_reason if first else None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "error": result.error,
        "attempt": result.attempt,
        "model": result.model,
    }
    more = len(result.choices) > 1 or any(c.logprobs is not None or c.tool_calls for c in result.choices)
    if more:
        line["choices"] = result.choices
    return line


class ResultWriter(Protocol):
    """Takes outcomes in order; `close` ends the file."""

    def write(self, results: list[Result]) -> None:
        """Add a page of outcomes."""
        ...

    def close(self) -> None:
        """Write what ends the format."""
        ...


class LineWriter:
    """One JSON object a line."""

    def __init__(self, out: IO[bytes], line: Callable[[Result], dict[str, Any]]) -> None:
        self._out = out
        self._line = line

    def write(self, results: list[Result]) -> None:
        """Add a page of outcomes."""
        self._out.write(b"".join(_encode(self._line(r)) + b"\n" for r in results))

    def close(self) -> None:
        """Lines need no end."""


class ParquetWriter:
    """One row an outcome; needs the extra `parquet`. A page is a row group at most, so memory is flat."""

    def __init__(self, out: IO[bytes]) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            msg = "writing Parquet needs pyarrow: pip install 'headrace[parquet]'"
            raise InvalidInput(msg, code="missing_extra") from None
        arrow: Any = pa
        self._arrow = arrow
        text, count = arrow.string(), arrow.int64()
        self._schema = arrow.schema(
            [
                ("index", count),
                ("custom_id", text),
                ("status", text),
                ("output", text),
                ("finish_reason", text),
                ("prompt_tokens", count),
                ("completion_tokens", count),
                ("error_type", text),
                ("error_message", text),
                ("attempt", count),
                ("model", text),
                ("choices", text),
                ("generation", count),
                ("worker", text),
                ("trace_id", text),
            ]
        )
        self._writer: Any = parquet.ParquetWriter(out, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, results: list[Result]) -> None:
        """Add a page of outcomes."""
        rows = [_row(r) for r in results]
        self._rows += rows
        self._bytes += sum(len(row["output"] or "") + len(row["choices"] or "") for row in rows)
        if len(self._rows) >= _ROW_GROUP or self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
        self._writer.write_table(table)
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        """Write the rest and the footer."""
        if self._rows:
            self._flush()
        self._writer.close()


def _row(result: Result) -> dict[str, Any]:
    line = jsonl_line(result)
    output, choices, error = line["output"], line.get("choices"), result.error
    return {
        "index": result.index,
        "custom_id": result.custom_id,
        "status": result.status,
        "output": bytes(output).decode() if isinstance(output, msgspec.Raw) else output,
        "finish_reason": line["finish_reason"],
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "error_type": error.type if error else None,
        "error_message": error.message if error else None,
        "attempt": result.attempt,
        "model": result.model,
        "choices": _encode(choices).decode() if choices is not None else None,
        "generation": result.generation,
        "worker": result.worker,
        "trace_id": result.trace_id,
    }


async def write_results(pages: AsyncIterator[list[Result]], form: ResultFormat, out: str | Path) -> int:
    """Write all `pages` to the file `out`, or to standard output for `-`; return how many outcomes.

    The file is written beside its place and renamed, so that a reader never finds half of it. `InvalidInput` if the
    place does not take it.
    """
    count = 0
    with opened_output(out) as file:
        writer = make_writer(form, file)
        try:
            async for page in pages:
                writer.write(page)
                count += len(page)
        finally:
            writer.close()  # also after a failure: pyarrow would do it later, on a file that is gone
    return count


def make_writer(form: ResultFormat, out: IO[bytes]) -> ResultWriter:
    """The writer of a format; raise `InvalidInput` for one that does not exist."""
    if form == "jsonl":
        return LineWriter(out, jsonl_line)
    if form == "openai":
        return LineWriter(out, openai_line)
    if form == "parquet":
        return ParquetWriter(out)
    msg = f"format {str(form)[:40]!r} is unknown: use jsonl, openai or parquet"
    raise InvalidInput(msg, field="format")


@contextmanager
def opened_output(out: str | Path) -> Generator[IO[bytes]]:
    """The file `out` to write to, beside its place until it is whole; standard output for `-`. Raise `InvalidInput` if
    the place does not take it.
    """
    if str(out) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(out)
    try:
        if not path.parent.is_dir() or path.is_dir():
            what = "is a folder" if path.is_dir() else f"cannot be made: there is no folder {path.parent}"
            msg = f"{path} {what}"
            raise InvalidInput(msg, field="out")
        with _written_to(path) if path.exists() and not path.is_file() else _replaced(path.resolve()) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror or e}"
        raise InvalidInput(msg, field="out", code="unwritable") from None


@contextmanager
def _written_to(path: Path) -> Generator[IO[bytes]]:
    """A device or a pipe is no place for another file: as root, a rename would put one there."""
    with path.open("wb") as file:
        yield file


@contextmanager
def _replaced(path: Path) -> Generator[IO[bytes]]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's umask, which a temporary file does not follow."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
