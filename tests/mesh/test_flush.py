"""Flushing over trouble: a ping whose pong never comes, and a pong that comes when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from headrace.contracts.errors import Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import account_info
from headrace.mesh.server import NatsServer

pytestmark = pytest.mark.anyio


async def pause(server: NatsServer) -> None:
    """SIGSTOP, and wait until it has come to pass."""
    server.pause()
    while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


async def test_a_flush_survives_the_death_of_the_broker(mesh: Mesh, nats_server: NatsServer) -> None:
    """The pong is lost with the connection; waiting for it would take the whole time."""
    await pause(nats_server)
    flushing = asyncio.create_task(mesh.flush(20.0))
    await asyncio.sleep(0.1)
    nats_server.kill()
    nats_server.restart()
    began = time.monotonic()
    await flushing
    assert time.monotonic() - began < 8


async def test_a_late_pong_does_not_make_the_connection_deaf(mesh: Mesh, nats_server: NatsServer) -> None:
    await pause(nats_server)
    with pytest.raises(Unavailable):
        await mesh.flush(0.3)
    nats_server.resume()
    await mesh.flush(5.0)
    assert (await account_info(mesh))["streams"] > 0
    assert mesh.losses == 0
