"""`hr.api.submit` while the queue is full or the broker away: an answer in time, and nothing lost or doubled."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import FunctionSpec
from headrace.gateway.service import GatewayService
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject, purge
from headrace.mesh.provision import register_function

pytestmark = pytest.mark.anyio
BODY = {"job": "j", "items": [{"prompt": "x" * 1000, "custom_id": f"c{i}"} for i in range(100)]}


@pytest.fixture
def settings(settings):
    """Queues of 100 kB."""
    return msgspec.structs.replace(settings, max_bytes=100_000)


@pytest.fixture
async def gateway(mesh, settings):
    await register_function(mesh, FunctionSpec(name="generate"))
    service = GatewayService(settings)
    await service.start()
    yield service
    await service.stop()


async def ask(mesh, body):
    answer = await mesh.request("hr.api.submit", msgspec.json.encode(body), timeout_s=5.0)
    return msgspec.json.decode(answer.data)


async def test_a_full_queue_is_said_in_time_and_the_same_request_goes_on_later(mesh, gateway):
    began = time.monotonic()
    error = (await ask(mesh, BODY))["error"]
    assert time.monotonic() - began < 5
    assert error["code"] == "queue_full"
    assert "job j" in error["message"]
    stored = await count_subject(mesh, "HR_TASKS", "hr.tasks.*.*.*.j")
    assert stored < 100
    # What was taken is worked off, as it is by workers.
    done = await purge(mesh, "HR_TASKS", filter_="hr.tasks.*.*.*.j")
    assert done == stored
    for _ in range(10):
        receipt = await ask(mesh, BODY)
        done += await purge(mesh, "HR_TASKS", filter_="hr.tasks.*.*.*.j")
        if "error" not in receipt:
            break
    assert receipt["submitted"] == 100
    assert done == 100


async def test_a_broker_that_restarts_leaves_the_gateway_serving(nats_server, mesh, gateway, settings):
    small = {"prompt": "x"}
    assert (await ask(mesh, small))["submitted"] == 1
    nats_server.kill()
    nats_server.restart()
    async with await Mesh.connect(settings, name="asker") as asker:
        for _ in range(50):
            try:
                receipt = await ask(asker, small)
                break
            except Unavailable:
                await asyncio.sleep(0.1)
    assert receipt["submitted"] == 1
