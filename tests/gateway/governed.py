"""A gateway in a process of its own, a callee in another, and what the ledger and the callee's log say of calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.contracts import codec
from headrace.contracts.account import CallView, Fold
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from headrace.mesh.tail import read_all
from tests.chaos.processes import Part
from tests.gateway.callee_process import CalleeProcess

CALLEES = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0

[gateway]
name = "g1"

[callees.read]
effect = "read"
{common}
[callees.idempotent]
effect = "idempotent"
{common}
[callees.cost_bearing]
effect = "cost_bearing"
{common}
{price}
[callees.money]
effect = "money"
{common}
[callees.money.resolver]
path = "/calls/{{key}}"
[callees.destructive]
effect = "destructive"
{common}
"""
COMMON = """kind = "openai"
base_url = "{url}"
timeout_s = {timeout_s}
max_output_tokens = 50
free = true
retry_cap_s = 1.0
settle_delay_s = 0.0
"""
PRICE = """[callees.cost_bearing.price]
version = "1"
input_micro_per_mtok = 1000000
output_micro_per_mtok = 1000000
"""


class Governed:
    """The mesh of a test: the broker is the fixture's."""

    def __init__(self, server: NatsServer, mesh: Mesh, folder: Path, *, timeout_s: float = 2.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mesh = mesh
        self.server = server
        self.callee = CalleeProcess(folder)
        common = COMMON.format(url=self.callee.url, timeout_s=timeout_s)
        text = CALLEES.format(url=server.url, common=common, price=PRICE)
        (folder / "headrace.toml").write_text(text, "utf-8")
        self.gateway = Part("gateway", folder)

    async def start(self, *, crash_at: str = "") -> None:
        self.gateway.start(crash_at=crash_at)
        await self.gateway.ready()

    def stop(self) -> None:
        self.gateway.kill()
        self.callee.stop()

    async def ask(self, callee: str, key: str | None, *, wait_s: float = 4.0, **body: Any) -> CallAnswer:
        body = {"messages": [{"role": "user", "content": "hi"}], "id": key or "none"} | body
        request = {"callee": callee, "body": body, "tenant": "t", "agent": "a", "key": key, "wait_s": wait_s}
        return msgspec.json.decode(
            await call_api(self.mesh, "call", request, timeout_s=wait_s + 3), type=CallAnswer
        )

    async def ask_until(self, callee: str, key: str, states: tuple[str, ...], **body: Any) -> CallAnswer:
        """Ask again and again, as a caller would, until the call is in one of `states`."""
        deadline = time.monotonic() + 30
        while True:
            answer = None
            with contextlib.suppress(HeadraceError):
                answer = await self.ask(callee, key, wait_s=1.0, **body)
                if answer.state in states:
                    return answer
            assert time.monotonic() < deadline, (answer, self.gateway.tail())
            await asyncio.sleep(0.1)

    async def fold(self) -> Fold:
        """The whole ledger."""
        fold = Fold()
        async for batch in read_all(self.mesh, self.mesh.topology.ledger, "hr.ledger.>"):
            for m in batch:
                kind = m.subject.split(".")[2]
                schema = {"budget": codec.BUDGET_HEAD, "roster": codec.ROSTER}.get(kind, codec.CALL_RECORD)
                fold.take(schema.decode(m.data, m.headers))
        return fold

    async def view(self, call: str) -> CallView | None:
        return (await self.fold()).calls.get(("t", call))

    def heard(self, key: str) -> list[dict[str, Any]]:
        """What the callee noted of the calls with this key: by the idempotency header, or the body's id."""
        return [e for e in self.callee.entries() if e["call"] == key]


@contextlib.contextmanager
def governed(server: NatsServer, mesh: Mesh, folder: Path, **options: Any) -> Iterator[Governed]:
    world = Governed(server, mesh, folder, **options)
    try:
        yield world
    finally:
        world.stop()
