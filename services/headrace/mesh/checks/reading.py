"""What checks read of a broker: each thing once, and only when a check asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from headrace.contracts import codec
from headrace.contracts.errors import NotFound, Undecodable
from headrace.contracts.messages import FunctionSpec, WorkerReport
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import account_info, call, last_message, stream_info

T = TypeVar("T")
Info = dict[str, Any]
"""An answer of JetStream's API, as it came."""


class Reading:
    """Reads of one connection, kept for as long as this object lives.

    Every method raises `Unavailable` if this user may not ask (`code` is `denied`) or nobody answers in time.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._found: dict[str, asyncio.Future[Any]] = {}

    async def _once(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        if key not in self._found:
            self._found[key] = asyncio.ensure_future(read())
        return await asyncio.shield(cast("asyncio.Future[T]", self._found[key]))

    async def account(self) -> Info:
        """Usage and limits of the account; `JetStreamError` where JetStream is off."""
        return await self._once("account", lambda: account_info(self.mesh))

    async def stream(self, name: str) -> Info | None:
        """Configuration and state of a stream, None if it is missing."""
        return await self._once(f"stream {name}", lambda: _or_none(stream_info(self.mesh, name)))

    async def consumers(self, stream: str) -> list[Info]:
        """Every consumer of a stream, foreign ones too; none if the stream is missing."""
        return await self._once(f"consumers {stream}", lambda: self._list_consumers(stream))

    async def _list_consumers(self, stream: str) -> list[Info]:
        if await self.stream(stream) is None:
            return []
        found: list[Info] = []
        while True:  # the broker pages at 256
            page = await call(self.mesh, f"CONSUMER.LIST.{stream}", {"offset": len(found)})
            consumers = cast("list[Info]", page.get("consumers") or [])
            found += consumers
            if not consumers or len(found) >= int(page.get("total", 0)):
                return found

    async def streams_on(self, subject: str) -> list[str]:
        """Names of the streams that take some subject of this filter."""
        page = await call(self.mesh, "STREAM.NAMES", {"subject": subject})
        return cast("list[str]", page.get("streams") or [])

    async def functions(self) -> list[FunctionSpec]:
        """Every registered function, by name; what cannot be decoded is left out."""
        return await self._once("functions", self._list_functions)

    async def _list_functions(self) -> list[FunctionSpec]:
        bucket = self.mesh.topology.functions_bucket
        found: list[FunctionSpec] = []
        for data in await self._values(bucket):
            try:
                found.append(codec.FUNCTION.decode(data))
            except Undecodable:
                continue
        return found

    async def reports(self) -> list[WorkerReport]:
        """The last report of each worker that reported lately."""
        return await self._once("reports", self._list_reports)

    async def _list_reports(self) -> list[WorkerReport]:
        found: list[WorkerReport] = []
        for data in await self._values(self.mesh.topology.workers_bucket):
            try:
                found.append(codec.WORKER_REPORT.decode(data))
            except Undecodable:
                continue  # of a newer worker, say
        return found

    async def _values(self, bucket: str) -> list[bytes]:
        info = await _or_none(stream_info(self.mesh, f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.>"))
        if info is None:
            return []
        subjects = sorted(info["state"]["subjects"])
        stored = await asyncio.gather(*(last_message(self.mesh, f"KV_{bucket}", s) for s in subjects))
        return [message.data for message in stored if message is not None and message.data]


async def _or_none(reading: Awaitable[Info]) -> Info | None:
    try:
        return await reading
    except NotFound:
        return None
