"""Callers in closed loops: each asks, waits for its answer, and asks again. What they see is how long a call took.

The same loop asks the callee itself, a gateway in the way of an agent, a gateway by `hr.api.call`, or an HTTP proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Raw, Struct

from headrace.contracts import codec
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish_message
from headrace.mesh.wire import OutMessage, header_block

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is two and two? " * 10}],
    "max_tokens": 16,
}
ANSWER_S = 60.0
_HEADERS = header_block({codec.SCHEMA_HEADER: codec.CALL.name})
_answer = msgspec.json.Decoder(CallAnswer)

Call = Callable[[int], Awaitable[None]]
"""One call of one caller (0, 1, …), to its answer."""


class Seen(Struct, frozen=True):
    """What callers saw in one run: latencies in seconds, and how long the run took."""

    latencies: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.latencies) / self.seconds

    def ms(self, percent: int) -> float:
        """A percentile, in milliseconds."""
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[percent - 1] * 1e3


async def run(call: Call, callers: int, seconds: float) -> Seen:
    """Let so many callers ask for so long."""
    latencies: list[float] = []
    began = time.perf_counter()
    until = began + seconds

    async def caller(number: int) -> None:
        while (at := time.perf_counter()) < until:
            await call(number)
            latencies.append(time.perf_counter() - at)

    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(caller(number))
    return Seen(latencies, time.perf_counter() - began)


class Agent:
    """Asks as an agent does: stores a call in its mailbox of calls, and listens for the answer."""

    def __init__(self, mesh: Mesh, callee: str, tenant: str = "bench") -> None:
        self._mesh = mesh
        self._callee = callee
        self._tenant = tenant
        self._body = Raw(json.dumps(BODY).encode())
        self._run = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    async def __call__(self, caller: int) -> None:
        agent = f"agent-{caller}"
        with self._mesh.listen() as (inbox, answered):
            name = f"{self._run}-{next(self._numbers)}"
            message = CallMessage(
                request=name, callee=self._callee, body=self._body, tenant=self._tenant, agent=agent, key=name,
                reply_to=inbox,
            )  # fmt: skip
            out = OutMessage(
                self._mesh.subjects.call(self._tenant, agent), codec.CALL.encode(message), _HEADERS
            )
            await publish_message(self._mesh, self._mesh.topology.calls, out)
            async with asyncio.timeout(ANSWER_S):
                check(_answer.decode((await answered).data))


class Api:
    """Asks `hr.api.call`."""

    def __init__(self, mesh: Mesh, callee: str) -> None:
        self._mesh = mesh
        self._callee = callee
        self._run = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    async def __call__(self, caller: int) -> None:
        request: dict[str, Any] = {
            "callee": self._callee, "body": BODY, "tenant": "bench", "agent": f"agent-{caller}",
            "key": f"{self._run}-{next(self._numbers)}", "wait_s": ANSWER_S,
        }  # fmt: skip
        check(_answer.decode(await call_api(self._mesh, "call", request, timeout_s=ANSWER_S + 5)))


def check(answer: CallAnswer) -> None:
    """A benchmark of failures says nothing."""
    if answer.state != "completed":
        raise RuntimeError(f"a call ended {answer.state}: {answer.error}")


class Http:
    """Posts to a server, each caller on a connection of its own that stays open. An async context manager."""

    def __init__(self, port: int, path: str = "/chat/completions", key: str = "none") -> None:
        self._port = port
        data = json.dumps(BODY).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._request = head.encode() + data
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def __call__(self, caller: int) -> None:
        if (
            caller not in self._open or self._open[caller][0].at_eof()
        ):  # servers close what was idle for seconds
            self._open[caller] = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._open[caller]
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the server answered {head[:40]!r}")
        size = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        await reader.readexactly(size)
        if b"connection: close" in head:
            writer.close()
            del self._open[caller]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, writer in self._open.values():
            writer.close()
