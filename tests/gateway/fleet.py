"""Several gateways in processes of their own that share the work, a callee, and what ledger and evidence say."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace.contracts import codec
from headrace.contracts.account import Fold
from headrace.contracts.calls import CallAnswer
from headrace.contracts.codec import TRACEPARENT
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import Evidence
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from headrace.mesh.tail import read_all
from tests.chaos.processes import Part
from tests.gateway.callee_process import CalleeProcess
from tests.gateway.governed import CALLEES, COMMON, PRICE
from tests.gateway.invariants import Stored, Told, Witness

HI = {"messages": [{"role": "user", "content": "hi"}]}


def traced(name: str) -> dict[str, str]:
    """The headers of a request in the trace of this name; none without one."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {TRACEPARENT: f"00-{digest[:32]}-{digest[32:48]}-01"} if name else {}


class Fleet:
    """Gateways `g1`, `g2`, …, each with its own folder; the broker is the caller's."""

    def __init__(
        self,
        server: NatsServer,
        mesh: Mesh,
        folder: Path,
        *,
        gateways: int = 1,
        timeout_s: float = 30.0,
        settings: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.server, self.mesh, self.folder = server, mesh, folder
        self.callee = CalleeProcess(folder)
        self._common = COMMON.format(url=self.callee.url, timeout_s=timeout_s) + settings
        self.gateways = [self.gateway(f"g{n + 1}") for n in range(gateways)]
        self.told: list[Told] = []

    def gateway(self, name: str) -> Part:
        """A further gateway, not started."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        text = CALLEES.format(url=self.server.url, common=self._common, price=PRICE)
        (folder / "headrace.toml").write_text(text.replace('"g1"', f'"{name}"'), "utf-8")
        return Part("gateway", folder)

    def stop(self) -> None:
        """Kill everything but the broker."""
        for part in self.gateways:
            part.kill()
        self.callee.stop()

    def logs(self) -> str:
        """What the gateways said last."""
        return "\n".join(f"--- {part.log.parent.name}\n{part.tail()}" for part in self.gateways)

    async def mend(self) -> None:
        """Start what is dead or was never started; return when all are ready."""
        for part in self.gateways:
            if part.process is None or part.code is not None:
                part.start()
        await self.all_ready()

    async def all_ready(self) -> None:
        """Return when every gateway is ready, or dead."""
        await asyncio.gather(*(part.ready() for part in self.gateways))

    async def restart_broker(self) -> None:
        """SIGKILL, and started again on the same store."""
        self.server.kill()
        await asyncio.to_thread(self.server.restart)
        await self.until(lambda: self.mesh.connected)

    # --- asking ------------------------------------------------------------------------------------
    async def ask(
        self,
        callee: str,
        key: str | None,
        body: dict[str, Any],
        *,
        agent: str = "a",
        wait_s: float = 8.0,
        trace: str = "",
    ) -> CallAnswer | None:
        """The answer at the front door; None if there was none. `trace` names the trace in which it is asked."""
        request = {
            "callee": callee,
            "body": body,
            "tenant": "t",
            "agent": agent,
            "key": key,
            "wait_s": wait_s,
        }
        try:
            data = await call_api(self.mesh, "call", request, timeout_s=wait_s + 3, headers=traced(trace))
        except HeadraceError:
            return None
        answer = msgspec.json.decode(data, type=CallAnswer)
        self.told.append(Told(time.time(), answer))
        return answer

    async def until(self, what: Callable[[], bool | Awaitable[bool]], within_s: float = 90.0) -> None:
        """Return when `what` holds; fail if it never does, or a gateway ends by itself."""
        deadline = time.monotonic() + within_s
        while True:
            found: bool | Awaitable[bool] = True
            with contextlib.suppress(HeadraceError):
                found = what()
                if found if isinstance(found, bool) else await found:
                    return
            for part in self.gateways:
                assert part.process is None or part.code in (None, -signal.SIGKILL), part.tail()
            assert time.monotonic() < deadline, self.logs()
            await asyncio.sleep(0.02 if isinstance(found, bool) else 0.2)  # what is awaited, reads streams

    # --- what is seen ------------------------------------------------------------------------------
    async def ledger(self, *, times: bool = False) -> list[Stored]:
        """Every record in order; with `times` also when the broker stored each."""
        found: list[Stored] = []
        stream = self.mesh.topology.ledger
        async for batch in read_all(self.mesh, stream, "hr.ledger.>"):
            for m in batch:
                kind = m.subject.split(".")[2]
                schema = {"budget": codec.BUDGET_HEAD, "roster": codec.ROSTER}.get(kind, codec.CALL_RECORD)
                found.append(Stored(m.sequence, 0.0, schema.decode(m.data, m.headers)))
        if not times:
            return found

        async def stored_at(seq: int) -> float:
            message = (await jsapi.call(self.mesh, f"STREAM.MSG.GET.{stream}", {"seq": seq}))["message"]
            return datetime.fromisoformat(message["time"]).timestamp()

        ats: list[float] = []
        for start in range(0, len(found), 100):
            ats += await asyncio.gather(*(stored_at(s.seq) for s in found[start : start + 100]))
        return [s._replace(at=at) for s, at in zip(found, ats, strict=True)]

    async def fold(self) -> Fold:
        """The whole ledger, folded."""
        fold = Fold()
        for stored in await self.ledger():
            fold.take(stored.record)
        return fold

    async def evidence(self) -> list[Evidence]:
        """All evidence in order."""
        found: list[Evidence] = []
        async for batch in read_all(self.mesh, self.mesh.topology.evidence, "hr.evidence.>"):
            found += [codec.EVIDENCE.decode(m.data, m.headers) for m in batch]
        return found

    def heard(self) -> list[str]:
        """Name of the call of each entry in the callee's log."""
        return [entry["call"] for entry in self.callee.entries()]

    async def witness(self, names: dict[str, str], **more: Any) -> Witness:
        """All that was seen, for the invariants; `names` as `Witness` takes it."""
        return Witness(
            ledger=await self.ledger(times=True),
            entries=self.callee.entries(),
            names=names,
            evidence=await self.evidence(),
            told=self.told,
            **more,
        )
