"""Custom ids that stand twice (B6), in memory and over the buckets on disk."""

from __future__ import annotations

import pytest

from headrace.client import duplicates
from headrace.client.duplicates import DuplicateFinder
from headrace.contracts.errors import InvalidInput


@pytest.mark.parametrize("in_memory", [1, 7, 1_000_000])
def test_every_repeat_is_found_with_the_first_line(in_memory: int) -> None:
    with DuplicateFinder(in_memory=in_memory) as finder:
        for line in range(1, 2_001):
            finder.add(f"id-{line % 1_990}", line)
        assert finder.find() == [(line, line - 1_990) for line in range(1_991, 2_001)]


def test_a_third_repeat_names_the_first() -> None:
    with DuplicateFinder() as finder:
        for line in (3, 5, 9):
            finder.add("é\ud800", line)
        assert finder.find() == [(5, 3), (9, 3)]


def test_too_many_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MAX_DUPLICATES", 10)
    with DuplicateFinder() as finder:
        for line in range(1, 20):
            finder.add("same", line)
        with pytest.raises(InvalidInput, match="line 2"):
            finder.find()
