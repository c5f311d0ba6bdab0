"""Storing what an agent did, behind its back: several records to a message, again until the broker has them.

A record is captured once the broker has acked it. A lost ack makes it stored twice; its number tells. The counts are
stored as well, so that the data plane knows what is missing, and how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from headrace.agent.buffer import BUFFER_BYTES, RECORD_BYTES, Counts, Recorder, Waiting
from headrace.contracts import codec
from headrace.contracts.capture import MAX_RECORDS, CaptureCount, CaptureRecord, CaptureRecords, run_token
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import HeadraceError, Refused, Unavailable
from headrace.contracts.names import TOKEN_PATTERN, check_token
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.publisher import publish
from headrace.mesh.redact import Redactor

log = logging.getLogger("headrace.agent.capture")

LEAST_RECORDS: Final = 100
"""Room that each agent of a process has, however many they are."""
MESSAGE_BYTES: Final = 128 << 10
GATHER_S: Final = 0.1
"""How long the first record of a message waits for others."""
AWAKE: Final = 10
"""Looks in vain before the task sleeps until it is woken: waking it costs the one who records ten microseconds."""
COUNT_EVERY_S: Final = 10.0
"""How often counts are stored while something is recorded."""
WINDOW: Final = 4
"""Messages that are stored at once: order is told by their numbers."""
STORE_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 40.0
"""A slow broker is asked less and less often: what is sent again waits in the same buffer as the agent's messages."""

TOKEN: Final = re.compile(TOKEN_PATTERN)
_json = msgspec.json.Decoder(Raw).decode


class Capture:
    """Stores what is recorded, for one agent, until it is stopped."""

    def __init__(self, mesh: Mesh, agent: str, recorder: Recorder | None = None) -> None:
        self.agent = check_token("agent", agent)
        self.recorder = recorder or Recorder(limit=mesh.settings.agent.capture_records)
        self.record = self.recorder.record
        self._mesh = mesh
        self._redact = Redactor(mesh.settings.policy.redact)
        self._woken = asyncio.Event()
        self._stopping = False
        self._storing: set[asyncio.Task[bool]] = set()
        self._task: asyncio.Task[None] | None = None
        self._counted = Counts(0, 0, 0, 0)
        self._number = 0

    @property
    def counts(self) -> Counts:
        """The account of this life."""
        return self.recorder.counts

    def start(self) -> asyncio.Task[None]:
        """Begin to store; the task ends when it is stopped, or with an error that is a bug."""
        loop = asyncio.get_running_loop()
        self.recorder.on_waking(lambda: loop.call_soon_threadsafe(self._woken.set))
        self._task = loop.create_task(self._run(), name="capture")
        return self._task

    async def stop(self, within_s: float = 5.0) -> Counts:
        """Store what waits, for so long at most; count the rest as dropped, and store the last count."""
        self._stopping = True
        self._woken.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=within_s)
            for task in (*late, *self._storing):
                task.cancel()
            await asyncio.gather(self._task, *self._storing, return_exceptions=True)
            self._task = None
        self.recorder.give_up()
        counts = self.counts
        with contextlib.suppress(HeadraceError):
            await self._store_count(counts, final=True, timeout_s=max(0.5, min(2.0, within_s)))
        if counts.dropped:
            log.warning("not all that was recorded is captured", extra=_extra(self.agent, counts))
        return counts

    async def _run(self) -> None:
        counted_at, quiet = time.monotonic(), 0
        while not self._stopping:
            records = self.recorder.take(MAX_RECORDS, then_sleep=quiet >= AWAKE)
            quiet = 0 if records else quiet + 1
            if not records and quiet <= AWAKE:
                await asyncio.sleep(GATHER_S)
            elif not records:
                self._woken.clear()
                left = COUNT_EVERY_S - (time.monotonic() - counted_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self._counted == self.counts else max(0.0, left)):
                        await self._woken.wait()
            await self._begin(records)
            if time.monotonic() - counted_at >= COUNT_EVERY_S and self._counted != self.counts:
                counted_at = time.monotonic()
                await self._try_to_count()
        while records := self.recorder.take(MAX_RECORDS):
            await self._begin(records)
        if self._storing:
            await asyncio.gather(*self._storing)

    async def _begin(self, records: list[Waiting]) -> None:
        """Store records beside others; wait while there are as many messages under way as may be."""
        groups = _grouped(records)
        try:
            while groups:
                while len(self._storing) >= WINDOW:
                    await asyncio.wait(self._storing, return_when=asyncio.FIRST_COMPLETED)
                self._spawn(groups.pop(0))
        finally:
            for group in groups:
                self.recorder.lost(group)

    def _spawn(self, group: list[Waiting]) -> None:
        def ended(task: asyncio.Task[bool]) -> None:
            # Told here, since a task that is cancelled before its first step runs nothing of its own.
            self._storing.discard(task)
            stored = not task.cancelled() and task.exception() is None and task.result()
            (self.recorder.captured if stored else self.recorder.lost)(group)

        task = asyncio.get_running_loop().create_task(self._store(group))
        self._storing.add(task)
        task.add_done_callback(ended)

    async def _store(self, group: list[Waiting]) -> bool:
        """Store records of one run in one message, again until the broker has them; False if it never can."""
        first, attempt = group[0], 0
        try:
            run = run_token(first.run)
            message = CaptureRecords(
                agent=self.agent,
                run=run,
                life=self.recorder.life,
                tenant=self._mesh.settings.tenant,
                trace_id=first.trace_id,
                records=[self._record(r) for r in group],
            )
            subject, data = self._mesh.subjects.capture(self.agent, run), codec.CAPTURE.encode(message)
            while True:
                try:
                    await self._connected()
                    timeout_s = min(MAX_TIMEOUT_S, STORE_TIMEOUT_S * 2 ** min(attempt, 8))
                    await self._publish(subject, data, f"{self.recorder.life}.{first.seq}", timeout_s)
                except (Unavailable, JetStreamError) as e:
                    self._warn(e, attempt)
                    await asyncio.sleep(backoff_s(attempt))
                    attempt += 1
                else:
                    return True
        except (HeadraceError, ValueError) as e:  # a bug, and no reason to end the others
            log.exception("records cannot be stored", extra={"records": len(group), "reason": str(e)[:300]})
            return False

    async def _connected(self) -> None:
        """Return when the broker is there: what is sent to a lost connection waits in the buffer of all."""
        while not self._mesh.connected:
            if self._mesh.closed.is_set():
                raise Refused("the connection is closed")
            await asyncio.sleep(GATHER_S)

    def _record(self, record: Waiting) -> CaptureRecord:
        return CaptureRecord(
            seq=record.seq,
            at_us=record.at_us,
            kind=record.kind if TOKEN.match(record.kind) else "note",
            name=_text(record.name),
            message=_text(record.message),
            peer=_text(record.peer),
            hop=min(max(0, record.hop), 10_000),
            data=Raw(self._redact.json(_valid(record.data))) if record.data else Raw(b"null"),
        )

    async def _try_to_count(self) -> None:
        counts = self.counts
        try:
            await self._store_count(counts, final=False, timeout_s=STORE_TIMEOUT_S)
        except HeadraceError as e:
            self._warn(e, 0)
        else:
            self._counted = counts

    async def _store_count(self, counts: Counts, *, final: bool, timeout_s: float) -> None:
        self._number += 1
        count = CaptureCount(
            agent=self.agent,
            life=self.recorder.life,
            number=self._number,
            at_us=time.time_ns() // 1_000,
            recorded=counts.recorded,
            captured=counts.captured,
            dropped=counts.dropped,
            waiting=counts.waiting,
            final=final,
            tenant=self._mesh.settings.tenant,
        )
        subject = self._mesh.subjects.capture(self.agent, self.recorder.life)
        await self._publish(subject, codec.CAPTURE.encode(count), None, timeout_s)

    async def _publish(self, subject: str, data: bytes, msg_id: str | None, timeout_s: float) -> None:
        headers = {SCHEMA_HEADER: codec.CAPTURE.name}
        await publish(
            self._mesh,
            self._mesh.topology.capture,
            subject,
            data,
            headers=headers,
            msg_id=msg_id,
            timeout_s=timeout_s,
        )

    def _warn(self, error: Exception, attempt: int) -> None:
        if attempt == 0:
            extra = _extra(self.agent, self.counts) | {"reason": str(error)[:300]}
            log.warning("records wait for the broker", extra=extra)


def captures(mesh: Mesh, agents: Sequence[str]) -> dict[str, Capture]:
    """A capture for each agent of a process, which share the room that `agent.capture_records` gives it."""
    share = max(1, len(agents))
    limit = max(LEAST_RECORDS, mesh.settings.agent.capture_records // share)
    max_bytes = max(RECORD_BYTES, BUFFER_BYTES // share)
    return {name: Capture(mesh, name, Recorder(limit=limit, max_bytes=max_bytes)) for name in agents}


def _grouped(records: list[Waiting]) -> list[list[Waiting]]:
    """Records of one run together, in their order, no more bytes than a message should have."""
    groups: dict[tuple[str, str | None], list[Waiting]] = {}
    sizes: dict[tuple[str, str | None], int] = {}
    full: list[list[Waiting]] = []
    for record in records:
        key = (record.run, record.trace_id)
        size = sizes.get(key, 0) + len(record.data) + 200
        if size > MESSAGE_BYTES and key in groups:
            full.append(groups.pop(key))
            size = len(record.data) + 200
        groups.setdefault(key, []).append(record)
        sizes[key] = size
    return [*full, *groups.values()]


def _text(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()[:256]


def _valid(data: bytes) -> bytes:
    """`data` if it is JSON: an agent may have given bytes of its own."""
    try:
        data.decode()
        _json(data)
    except (msgspec.MsgspecError, ValueError):
        return b'{"unreadable":"bytes"}'
    return data


def _extra(agent: str, counts: Counts) -> dict[str, Any]:
    return {"agent": agent, **msgspec.structs.asdict(counts)}
