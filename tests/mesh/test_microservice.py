"""The edge: one JSON reply to each request, errors mapped, handlers concurrent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from headrace.contracts.api import JobRequest
from headrace.contracts.errors import HeadraceError, InvalidInput, NotFound, Refused, Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import ApiServer, call_api

pytestmark = pytest.mark.anyio


async def handle(request: JobRequest, _headers: Mapping[str, str]) -> dict[str, str]:
    """Misbehave by name."""
    match request.job:
        case "missing":
            msg = "job 'missing' is not known"
            raise NotFound(msg)
        case "bug":
            return {"secret": 1 / 0}  # type: ignore[dict-item]
        case "slow":
            await asyncio.sleep(30)
        case "huge":
            return {"x": "y" * 2_000_000}
        case _:
            pass
    return {"job": request.job}


async def serve(mesh: Mesh) -> ApiServer:
    """A service with one endpoint."""
    server = ApiServer(mesh, "headrace-test", description="test")
    server.endpoint("status", JobRequest, handle, timeout_s=0.5)
    await server.start()
    return server


async def test_replies_and_errors(mesh: Mesh) -> None:
    server = await serve(mesh)
    assert msgspec.json.decode(await call_api(mesh, "status", JobRequest(job="a"))) == {"job": "a"}
    with pytest.raises(NotFound, match="missing"):
        await call_api(mesh, "status", JobRequest(job="missing"))
    with pytest.raises(InvalidInput, match="a name has 1 to 128 of the characters"):
        await call_api(mesh, "status", {"job": "a b"})
    with pytest.raises(InvalidInput, match="unknown field"):
        await call_api(mesh, "status", {"job": "a", "x": 1})
    for body in (b"{", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(InvalidInput):
            await call_api(mesh, "status", body)
    with pytest.raises(Refused, match="bytes"):
        await call_api(mesh, "status", JobRequest(job="huge"))
    with pytest.raises(Unavailable, match="longer"):
        await call_api(mesh, "status", JobRequest(job="slow"))
    with pytest.raises(HeadraceError) as bug:
        await call_api(mesh, "status", JobRequest(job="bug"))
    assert "ZeroDivision" not in str(bug.value)
    assert bug.value.code == "internal"
    await server.stop()
    with pytest.raises(Unavailable, match="is it running"):
        await call_api(mesh, "status", JobRequest(job="a"))


async def test_a_slow_request_does_not_hold_up_others(mesh: Mesh) -> None:
    server = await serve(mesh)
    slow = asyncio.ensure_future(call_api(mesh, "status", JobRequest(job="slow")))
    await asyncio.sleep(0)
    for _ in range(20):
        await call_api(mesh, "status", JobRequest(job="quick"))
    assert not slow.done()
    with pytest.raises(Unavailable):
        await slow
    await server.stop()


async def test_found_by_the_micro_protocol(mesh: Mesh) -> None:
    server = await serve(mesh)
    info = msgspec.json.decode((await mesh.request("$SRV.INFO.headrace-test", b"")).data)
    assert [e["subject"] for e in info["endpoints"]] == ["hr.api.status"]
    await call_api(mesh, "status", JobRequest(job="a"))
    stats = msgspec.json.decode((await mesh.request("$SRV.STATS.headrace-test", b"")).data)
    assert stats["endpoints"][0]["num_requests"] == 1
    ping = msgspec.json.decode((await mesh.request("$SRV.PING", b"")).data)
    assert ping["name"] == "headrace-test"
    await server.stop()
