"""Fixtures of the forge's tests."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop


@pytest.fixture
def anyio_backend() -> Any:
    """Processes of functions are started by the loop that runs services, which is uvloop's."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})
