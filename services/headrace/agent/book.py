"""An agent's committed state: read once, then written version by version, each only if nobody wrote between.

The first write of a run takes over: from then on every write of an older run is refused by the broker, and that run
learns that it is fenced. A lost PubAck is settled by reading the last record: it names the run and the version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from headrace.agent.errors import Fenced
from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import HeadraceError, Refused, Unavailable
from headrace.contracts.mail import AgentState
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.group_store import GroupStore
from headrace.mesh.jsapi import JetStreamError, last_message
from headrace.mesh.mail import now_us
from headrace.mesh.wire import OutMessage, header_block

log = logging.getLogger("headrace.agent")

WRONG_SEQUENCE: Final = 10071
HEADROOM: Final = 4_096
_HEADERS: Final = header_block({SCHEMA_HEADER: codec.AGENT_STATE.name})

Change = Callable[[AgentState], AgentState]


class Book:
    """The records of one agent, as one run writes them. `owner` is that run's id."""

    def __init__(self, mesh: Mesh, agent: str, owner: str, *, group: GroupStore | None = None) -> None:
        self._mesh = mesh
        self._group = group or GroupStore(mesh, mesh.topology.agents)
        self._stream = mesh.topology.agents
        self._subject = mesh.subjects.agent_state(agent)
        self._owner = owner
        self._one_at_a_time = asyncio.Lock()
        self.record = AgentState(agent=agent, version=0, owner=owner)
        self.seq = 0
        self.fenced = False

    async def take_over(self) -> AgentState:
        """Become the run that writes; return the record, with whatever the run before left to be sent.

        Its version is not less than the milliseconds since the epoch. What an agent sends is numbered by its versions,
        and receivers would take the mails of one that begins anew, its records lost, for repeats.
        """
        while True:
            stored = await last_message(self._mesh, self._stream, self._subject)
            if stored is not None:
                self.record = codec.AGENT_STATE.decode(stored.data, stored.headers)
                self.seq = stored.sequence
            try:
                return await self.commit(lambda record: record, at_least=now_us() // 1_000)
            except Fenced:  # the other one is still writing: after its last word, then
                self.fenced = False

    async def commit(self, change: Change, *, at_least: int = 0) -> AgentState:
        """Store what `change` makes of the record, as its next version.

        Raise `Fenced` if another run has taken over, `Refused` (`too_large`) if it does not fit into a message. While
        the broker is away it keeps trying. Never cancel it: a record that may be stored has to be known.
        """
        async with self._one_at_a_time:
            if self.fenced:
                raise self._fence()
            before = self.record
            version = max(before.version + 1, at_least)
            record = replace(change(before), version=version, owner=self._owner, at_us=now_us())
            data = codec.AGENT_STATE.encode(record)
            if len(data) + HEADROOM > self._mesh.max_payload:
                msg = (
                    f"the state of {record.agent} with what it sends has {len(data)} bytes; the broker takes "
                    f"{self._mesh.max_payload - HEADROOM} at most"
                )
                raise Refused(msg, code="too_large")
            self.seq = await self._store(OutMessage(self._subject, data, _HEADERS), record)
            self.record = record
            return record

    async def _store(self, message: OutMessage, record: AgentState) -> int:
        attempt = 0
        while True:
            try:
                return await self._group.store([(message, self.seq)])
            except JetStreamError as e:
                if e.err_code == WRONG_SEQUENCE:
                    return await self._own_write(record)
                _waits(record, e)
            except Unavailable as e:
                if self._mesh.closed.is_set():
                    raise
                _waits(record, e)
            await asyncio.sleep(
                backoff_s(attempt)
            )  # away or full; if it is stored, the next try will show it
            attempt += 1

    async def _own_write(self, record: AgentState) -> int:
        """The sequence of `record` if the last one is that, written by a try whose ack was lost."""
        attempt = 0
        while True:
            try:
                stored = await last_message(self._mesh, self._stream, self._subject)
            except Unavailable:
                if self._mesh.closed.is_set():
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            if stored is not None:
                found = codec.AGENT_STATE.decode(stored.data, stored.headers)
                if (found.owner, found.version) == (record.owner, record.version):
                    return stored.sequence
            raise self._fence()

    async def quiet(self) -> None:
        """Return when no write is under way."""
        async with self._one_at_a_time:
            pass

    def _fence(self) -> Fenced:
        self.fenced = True
        return Fenced(f"another run of agent {self.record.agent} has taken over")


def _waits(record: AgentState, error: HeadraceError) -> None:
    extra = {"agent": record.agent, "version": record.version, "reason": str(error)[:200]}
    log.warning("a state is not stored yet", extra=extra)
