"""Fixtures of completion's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.completion.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """A fresh data plane."""
    opened = Store(tmp_path / "plane.duckdb")
    await opened.open()
    yield opened
    await opened.close()
