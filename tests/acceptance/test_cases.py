"""docs/cases.md: every case that was reported elsewhere has a test here, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    *(f"A{n}" for n in range(1, 21)),
    *(f"B{n}" for n in range(1, 13)),
    *(f"S{n}" for n in range(1, 11)),
    *(f"G{n}" for n in range(1, 15)),
    *(f"M{n}" for n in range(1, 13)),
]
_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def table() -> dict[str, list[tuple[str, str]]]:
    """The tests of each row: file under tests/, name."""
    found = _ROW.findall((ROOT / "docs" / "cases.md").read_text("utf-8"))
    assert len({row[0] for row in found}) == len(found), "a row stands twice"
    return {row: _TEST.findall(tests) for row, _, _, tests in found}


@functools.cache
def functions_of(path: Path) -> dict[str, int]:
    """The test functions of a file, with how many statements beyond a docstring each has."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name: len(f.body) - bool(ast.get_docstring(f)) for f in functions if f.name.startswith("test_")}


def test_every_case_has_a_row_and_each_row_a_test() -> None:
    rows = table()
    assert list(rows) == ROWS
    assert [row for row, tests in rows.items() if not tests] == []


@pytest.mark.parametrize("row", ROWS)
def test_every_test_that_a_row_names_exists(row: str) -> None:
    for file, name in table()[row]:
        path = ROOT / "tests" / file
        assert path.is_file(), f"{row}: there is no {path}"
        assert name in functions_of(path), f"{row}: {file} has no {name}"
        assert functions_of(path)[name] > 0, f"{row}: {name} tests nothing"


def test_names_that_begin_with_a_case_stand_in_its_row() -> None:
    """A test named for a case, `test_a8_...`, is found from the table."""
    named = {test for tests in table().values() for test in tests}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in functions_of(path):
            case = re.match(r"test_([absgm]\d+)_", name)
            if case and case[1].upper() in ROWS:
                file = str(path.relative_to(ROOT / "tests"))
                assert (file, name) in named, (
                    f"{file}::{name} is not in the row {case[1].upper()} of docs/cases.md"
                )
