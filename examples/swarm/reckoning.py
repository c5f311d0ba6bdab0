"""What happened, by what is stored: the agents' committed diaries, the mailboxes, the dead letters and the ledger."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from diary import Diary
from places import AGENTS
from swarm import Findings

from headrace.contracts import codec
from headrace.contracts.account import Fold
from headrace.contracts.errors import HeadraceError
from headrace.contracts.mail import AgentState
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message, stream_info
from headrace.mesh.tail import read_all


class Progress:
    """How many messages the agents have handled, as their records say it while they are stored."""

    def __init__(self) -> None:
        self._by_agent: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.reported = False

    @property
    def handled(self) -> int:
        """All of them together."""
        return sum(self._by_agent.values())

    def take(self, record: AgentState) -> None:
        """One more record, also one of a batch that is not stored in the end."""
        state = _state(record, Findings)
        self._by_agent[record.agent] = max(self._by_agent.get(record.agent, 0), len(state.handled))
        self.reported = self.reported or bool(state.report)
        self._changed.set()

    async def reaches(self, mark: int) -> None:
        """Return when so many are handled."""
        while self.handled < mark:
            self._changed.clear()
            await self._changed.wait()

    async def moves(self, within_s: float) -> bool:
        """Whether a record comes within that time."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


@dataclass
class Reckoning:
    """The end of a run. `wrong` says in words what should not be."""

    report: str = ""
    messages: int = 0
    """Different messages between agents, and the one that began it all."""
    handled: int = 0
    """How often a handler's work on one of them was committed."""
    calls: int = 0
    repeated_calls: int = 0
    """Calls of which more than one attempt may have been made."""
    lost: int = 0
    """Messages that were neither handled nor kept as dead letters."""
    wrong: list[str] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        """Of the report."""
        return hashlib.sha256(self.report.encode()).hexdigest()


async def reckon(mesh: Mesh, root: str) -> Reckoning:
    """Count everything; `root` is the id of the message that began it."""
    diaries: dict[str, Diary] = {}
    report = ""
    for agent in AGENTS:
        stored = await last_message(mesh, mesh.topology.agents, mesh.subjects.agent_state(agent))
        record = None if stored is None else codec.AGENT_STATE.decode(stored.data, stored.headers)
        diaries[agent] = Diary() if record is None else _state(record, Findings)
        report = report or getattr(diaries[agent], "report", "")
    fold = await _fold(mesh)
    found = compare(diaries, root, await _dead(mesh), fold)
    found.report = report
    # Beside the ledger's own word: each attempt at the model is one task in the queue.
    tasks = int((await stream_info(mesh, mesh.topology.tasks))["state"]["last_seq"])
    attempts = sum(len(view.attempts) for view in fold.calls.values())
    if tasks > attempts:
        found.repeated_calls += tasks - attempts
        found.wrong.append(f"{tasks} tasks were stored for the model, and the ledger has {attempts} attempts")
    if not report:
        found.wrong.append("there is no report")
    return found


def compare(diaries: Mapping[str, Diary], root: str, dead: Sequence[str], fold: Fold) -> Reckoning:
    """The diaries against one another, and the calls."""
    sent = [root, *(id_ for diary in diaries.values() for id_ in diary.sent)]
    handled = Counter(entry.id for diary in diaries.values() for entry in diary.handled)
    found = Reckoning(messages=len(set(sent)), handled=handled.total())
    missing = set(sent) - set(handled) - set(dead)
    found.lost = len(missing)
    if missing:
        found.wrong.append(f"{len(missing)} messages were neither handled nor kept: {sorted(missing)[:5]}")
    if len(sent) != len(set(sent)):
        found.wrong.append(f"{len(sent) - len(set(sent))} messages were sent twice under one id")
    if dead:
        found.wrong.append(f"{len(dead)} dead letters")
    found.wrong += [f"message {id_} took effect {n} times" for id_, n in handled.items() if n > 1]
    found.wrong += [f"message {id_} was handled and never sent" for id_ in set(handled) - set(sent)]
    found.wrong += _out_of_order(diaries)
    found.calls = len(fold.calls)
    for (_, call), view in fold.calls.items():
        if sum(a.state not in ("failed", "attempt_failed") for a in view.attempts) > 1:
            found.repeated_calls += 1
            found.wrong.append(f"call {call} was made more than once")
        elif view.state != "completed":
            found.wrong.append(f"call {call} is {view.state}")
    found.wrong += fold.differences()
    return found


def _out_of_order(diaries: Mapping[str, Diary]) -> list[str]:
    wrong: list[str] = []
    for agent, diary in diaries.items():
        last: dict[str, int] = {}
        for entry in diary.handled:
            if entry.lane != "work" or entry.seq == 0:
                continue
            if entry.seq <= last.get(entry.sender, 0):
                wrong.append(
                    f"{agent} handled message {entry.seq} of {entry.sender} after {last[entry.sender]}"
                )
            last[entry.sender] = entry.seq
    return wrong


async def waiting(mesh: Mesh) -> int:
    """Messages that are not handled yet, answers to calls among them."""
    return int((await stream_info(mesh, mesh.topology.mail))["state"]["messages"])


def _state(record: AgentState, type_: type[Findings]) -> Findings:
    return msgspec.json.decode(record.state, type=type_ | None) or type_()


async def _dead(mesh: Mesh) -> list[str]:
    found: list[str] = []
    async for message in _all(mesh, mesh.topology.dead, "dead"):
        letter = codec.DEAD_LETTER.decode(message.data, message.headers)
        try:
            found.append(codec.MAIL.decode(letter.data, letter.headers).id)
        except HeadraceError:
            found.append(f"{letter.subject}: {letter.reason}"[:200])
    return found


async def _fold(mesh: Mesh) -> Fold:
    fold = Fold()
    schemas = {"budget": codec.BUDGET_HEAD, "roster": codec.ROSTER}
    async for message in _all(mesh, mesh.topology.ledger, "ledger"):
        schema = schemas.get(message.subject.split(".")[2], codec.CALL_RECORD)
        fold.take(schema.decode(message.data, message.headers))
    return fold


async def _all(mesh: Mesh, stream: str, room: str) -> AsyncIterator[Any]:
    async for batch in read_all(mesh, stream, f"{mesh.subjects.prefix}.{room}.>"):
        for message in batch:
            yield message
