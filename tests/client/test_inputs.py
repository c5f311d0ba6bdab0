"""Where lines come from: files, gzip, standard input, pipes, tables, iterables; each can be read twice."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.client.inputs import Input, open_input
from headrace.contracts.errors import Conflict, InvalidInput, NotFound


def read(opened: Input) -> list[tuple[int, Any]]:
    """Numbers and decoded lines, read twice and found equal."""
    found = [
        [
            (n, json.loads(line) if line and not line.isspace() else line)
            for block in opened.lines.blocks()
            for n, line in zip(block.numbers, block.lines, strict=True)
        ]
        for _ in range(2)
    ]
    assert found[0] == found[1]
    return found[0]


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(b'{"prompt":"a"}\n') + gzip.compress(b'\n{"prompt":"b"}'))
    with open_input(path) as opened:
        assert read(opened) == [(1, {"prompt": "a"}), (2, b""), (3, {"prompt": "b"})]
        assert opened.total_bytes == opened.lines.position() == path.stat().st_size


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(10_000))[:-200])
    with open_input(path) as opened, pytest.raises(InvalidInput, match=r"in\.jsonl\.gz is damaged gzip"):
        list(opened.lines.blocks())


@pytest.mark.parametrize(
    ("magic", "name"), [(b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\x03\x04", "zip"), (b"BZh9", "bzip2")]
)
def test_other_packings_are_named(tmp_path: Path, magic: bytes, name: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(magic + b"....")
    with pytest.raises(InvalidInput, match=name):
        open_input(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        open_input(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="folder"):
        open_input(tmp_path)


def test_what_the_system_does_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: File name too long"):
        open_input(tmp_path / ("x" * 300))
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    with open_input(path) as opened:
        path.unlink()
        with pytest.raises(InvalidInput, match=r"in\.jsonl cannot be read"):
            list(opened.lines.blocks())
        with pytest.raises(InvalidInput, match=r"in\.jsonl cannot be read"):
            opened.check_unchanged()
    path.write_text("{}")

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InvalidInput, match="cannot be read: Permission denied"):
        open_input(path)


def test_standard_input_is_spooled_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b'{"prompt":"a"}'))))
    with open_input("-") as opened:
        assert opened.name == "standard input"
        assert read(opened) == [(1, {"prompt": "a"})]
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_spooled(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b'{"prompt":"a"}\n'))
    writer.start()
    with open_input(path) as opened:
        assert read(opened) == [(1, {"prompt": "a"})]
    writer.join()


def test_an_iterable_of_dicts_and_prompts() -> None:
    with open_input(iter([{"prompt": "a", "seed": 1}, "b"])) as opened:
        assert read(opened) == [(1, {"prompt": "a", "seed": 1}), (2, {"prompt": "b"})]
    with pytest.raises(InvalidInput, match="row 2"):
        open_input([{"prompt": "a"}, {"prompt": object()}])


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a"}\n')
    with open_input(path) as opened:
        opened.check_unchanged()
        path.write_text('{"prompt":"b"}\n{}\n')
        with pytest.raises(Conflict, match="was changed"):
            opened.check_unchanged()


# --- tables ------------------------------------------------------------------------------------------


def test_csv_numbers_rows_by_the_line_on_which_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes('\ufeffid,text,more\r\n1,"two\nlines",x\r\n\r\n2,"a ""quoted"" é",y\r\n3\r\n'.encode())
    with open_input(path, column="text", id_column="id") as opened:
        assert read(opened) == [
            (2, {"prompt": "two\nlines", "custom_id": "1"}),
            (4, b""),
            (5, {"prompt": 'a "quoted" é', "custom_id": "2"}),
            (6, {"prompt": None, "custom_id": "3"}),
        ]


def test_tsv_and_gzipped_csv(tmp_path: Path) -> None:
    tsv = tmp_path / "in.tsv"
    tsv.write_text("a\ttext\n1\tx, y\n")
    with open_input(tsv, column="text") as opened:
        assert read(opened) == [(2, {"prompt": "x, y"})]
    packed = tmp_path / "in.csv.gz"
    packed.write_bytes(gzip.compress(b"text\nz\n"))
    with open_input(packed, column="text") as opened:
        assert read(opened) == [(2, {"prompt": "z"})]


def test_columns_must_exist_and_be_named(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("a,b,b\n1,2,3\n")
    with pytest.raises(InvalidInput, match="--column"):
        open_input(path)
    for column, reason in (("c", "no column"), ("b", "several columns")):
        with open_input(path, column=column) as opened, pytest.raises(InvalidInput, match=reason):
            list(opened.lines.blocks())
    lines = tmp_path / "in.jsonl"
    lines.write_text("{}")
    with pytest.raises(InvalidInput, match="only given for CSV and Parquet"):
        open_input(lines, column="a")


def test_a_quote_that_stays_open_swallows_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text,id\na,1\n"b,2\nc,3\n')
    with (
        open_input(path, column="text") as opened,
        pytest.raises(InvalidInput, match="begins on line 3") as e,
    ):
        list(opened.lines.blocks())
    assert e.value.line == 3


def test_a_row_with_more_cells_than_columns_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,id\nhello, world,1\na,2,\n")
    with open_input(path, column="text") as opened:
        assert read(opened) == [
            (2, {"prompt": "hello", "cell 3 of 2 columns": None}),
            (3, {"prompt": "a"}),
        ]


def test_a_parquet_file_that_is_none_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_text("text")
    with open_input(path, column="text") as opened, pytest.raises(InvalidInput, match="no Parquet file"):
        list(opened.lines.blocks())


def test_an_empty_csv_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    for content in ("", "text\n"):
        path.write_text(content)
        with open_input(path, column="text") as opened:
            assert read(opened) == []


def test_csv_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b"text\nok\n\xff\xfe\n")
    with open_input(path, column="text") as opened, pytest.raises(InvalidInput, match="not UTF-8"):
        list(opened.lines.blocks())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (["a", "b"], "prompt"),
        ([[1, 2], [3]], "prompt_token_ids"),
        ([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], "messages"),
        (pa.array(["a", "b"]).dictionary_encode(), "prompt"),
    ],
)
def test_parquet_columns(tmp_path: Path, values: Any, field: str) -> None:
    path = tmp_path / "in"
    pq.write_table(pa.table({"text": values, "id": [7, 8], "other": [0, 0]}), path)
    with open_input(path, column="text", id_column="id") as opened:
        first, second = read(opened)
        plain = values.to_pylist() if isinstance(values, pa.Array) else values
        assert first == (1, {field: plain[0], "custom_id": "7"})
        assert second == (2, {field: plain[1], "custom_id": "8"})


def test_parquet_that_holds_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": [1.5, 2.5]}), path)
    with open_input(path, column="x") as opened, pytest.raises(InvalidInput, match="type double"):
        list(opened.lines.blocks())
    path.write_bytes(b"PAR1 and then nothing")
    with open_input(path, column="x") as opened, pytest.raises(InvalidInput, match="no Parquet"):
        list(opened.lines.blocks())


def test_parquet_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": [f"prompt {i}" for i in range(2_500)]}), path)
    with open_input(path, column="x") as opened:
        sizes = [len(block.lines) for block in opened.lines.blocks()]
        assert sizes == [1_000, 1_000, 500]
