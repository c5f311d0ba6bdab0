"""Fixtures of the client's tests: a mesh with a function registered."""

from __future__ import annotations

import pytest

from headrace.mesh.connection import Mesh
from headrace.mesh.provision import register_function
from tests.client.harness import SPEC


@pytest.fixture
async def ready(mesh: Mesh) -> Mesh:
    """A connection to a mesh where the function `generate` is registered; no worker runs."""
    await register_function(mesh, SPEC)
    return mesh
