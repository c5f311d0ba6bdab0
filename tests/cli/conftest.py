"""Fixtures of the command's tests: one echo mesh for those that only use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.harness import Up


@pytest.fixture
def anyio_backend() -> Any:
    """The command runs on asyncio's own loop (`asyncio.run`), so its tests do as well."""
    return ("asyncio", {})


@pytest.fixture(scope="session")
def echo_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A running mesh with the echo engine, shared by the tests that leave it as they found it."""
    up = Up(tmp_path_factory.mktemp("mesh") / "D")
    yield up
    up.kill()
