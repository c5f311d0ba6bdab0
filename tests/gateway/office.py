"""Gateways with callees and a policy of the test's own, in this process, and one real callee beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.contracts.calls import CallAnswer, CallHistory
from headrace.contracts.ledger import Evidence
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.service import GatewayService
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.settings import Settings
from tests.gateway.callee_process import CalleeProcess

T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T | None]], timeout_s: float = 30.0) -> T:
    """What `look` gives once it gives something."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await look()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.05)


class Office:
    """A mesh with one callee process; its gateways run in this process."""

    def __init__(self, mesh: Mesh, settings: Settings, callee: CalleeProcess) -> None:
        self.mesh = mesh
        self.callee = callee
        self._settings = settings
        self.gateways: list[GatewayService] = []

    def declared(self, **settings: Any) -> dict[str, Any]:
        """A callee's settings, on the office's own server."""
        common = {
            "kind": "openai",
            "effect": "cost_bearing",
            "base_url": self.callee.url,
            "max_output_tokens": 50,
        }
        return {**common, "timeout_s": 20.0, "free": True, **settings}

    async def open(self, *, callees: dict[str, Any], **sections: Any) -> GatewayService:
        """Start one more gateway."""
        plain = msgspec.to_builtins(self._settings) | {"callees": callees} | sections
        service = GatewayService(msgspec.convert(plain, Settings))
        await service.start()
        self.gateways.append(service)
        return service

    async def ask(
        self, callee: str, key: str | None = None, *, agent: str = "a", tenant: str = "t", wait_s: float = 4.0,
        deadline_s: float | None = None, **body: Any,
    ) -> CallAnswer:  # fmt: skip
        """One asking."""
        body = {"messages": [{"role": "user", "content": "hi"}], "id": key or "none"} | body
        request = {
            "callee": callee, "body": body, "tenant": tenant, "agent": agent, "key": key, "wait_s": wait_s,
            "deadline_s": deadline_s,
        }  # fmt: skip
        data = await call_api(self.mesh, "call", request, timeout_s=wait_s + 5)
        return msgspec.json.decode(data, type=CallAnswer)

    async def api(self, name: str, request: dict[str, Any], type_: type[T]) -> T:
        """Any endpoint."""
        return msgspec.json.decode(await call_api(self.mesh, name, request, timeout_s=20.0), type=type_)

    async def show(self, call: str) -> CallHistory:
        """What happened to a call."""
        return await self.api("calls.show", {"call": call}, CallHistory)

    async def evidence(self, call: str, tenant: str = "t") -> list[Evidence]:
        """What stands in the stream of evidence."""
        return await EvidenceStream(self.mesh).of(tenant, call)

    async def close(self) -> None:
        """Stop the gateways."""
        for gateway in self.gateways:
            await gateway.stop()


@contextlib.asynccontextmanager
async def office(mesh: Mesh, settings: Settings, folder: Path) -> AsyncIterator[Office]:
    """An office that leaves nothing behind."""
    callee = CalleeProcess(folder)
    made = Office(mesh, settings, callee)
    try:
        yield made
    finally:
        await made.close()
        callee.stop()
