"""Fixtures of every test: a fresh nats-server each, and a connected, provisioned mesh."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings

# A shell ignores SIGINT for what it runs in the background, and so would every process that a test starts:
# none of them could be interrupted as by Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Each async test runs on asyncio and on uvloop."""
    return request.param


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A fresh broker on a free port, with `kill()` and `restart()` on the same store."""
    server = NatsServer(tmp_path / "nats", durability="relaxed")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    """Settings that point at the broker of this test."""
    return Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", ack_wait_s=5.0)


@pytest.fixture
async def mesh(settings: Settings) -> AsyncIterator[Mesh]:
    """A connection with all streams made."""
    async with await Mesh.connect(settings, name="test") as connected:
        await provision(connected)
        yield connected
