"""Bytes to numbered lines (B11), whatever the chunks and however long a line is."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.lines import split_lines
from headrace.contracts.errors import InvalidInput


def lines(data: bytes, **options: int) -> list[tuple[int, bytes | None]]:
    return [
        pair
        for block in split_lines(io.BytesIO(data).read, **options)
        for pair in zip(block.numbers, block.lines, strict=True)
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"\n\na\n", [(1, b""), (2, b""), (3, b"a")]),
        (b"a\r\nb\r\n", [(1, b"a\r"), (2, b"b\r")]),
        (b"\xef\xbb\xbfa\n", [(1, b"a")]),
        (b"\xef\xbb\xbf", []),
        (b"\n", [(1, b"")]),
    ],
)
@pytest.mark.parametrize("chunk", [3, 4, 1 << 20])
def test_forms_of_a_file(data: bytes, expected: list[tuple[int, bytes]], chunk: int) -> None:
    assert lines(data, chunk=chunk) == expected


@given(st.binary(max_size=200), st.integers(min_value=3, max_value=50))
def test_chunks_change_nothing(data: bytes, chunk: int) -> None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    expected = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line for _, line in lines(data, chunk=chunk)] == expected


def test_a_line_over_the_bound_is_skipped_and_its_neighbours_are_not() -> None:
    data = b"a\n" + b"x" * 1_000 + b"\nb\n" + b"y" * 1_000
    assert lines(data, chunk=16, max_line=100) == [(1, b"a"), (2, None), (3, b"b"), (4, None)]
    assert lines(b"x" * 100, chunk=16, max_line=100) == [(1, b"x" * 100)]


@pytest.mark.parametrize("text", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused(text: str) -> None:
    mark = b"\xff\xfe" if text.endswith("le") else b"\xfe\xff"
    with pytest.raises(InvalidInput, match="UTF-16"):
        lines(mark + '{"prompt": "a"}'.encode(text))
