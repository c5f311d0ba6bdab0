"""One agent in a process: its three lanes, one handler at a time, its start and its end.

The control lane is always read; the reply lane brings what a waiting handler asked for while it waits, and what durable
questions were answered in its turn; the work lane is leased one message at a time, so a sender's order holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from headrace.agent import asking
from headrace.agent.agent import Agent
from headrace.agent.book import Change
from headrace.agent.committing import Committer
from headrace.agent.context import Context
from headrace.agent.control import is_control, obey
from headrace.agent.errors import Fenced
from headrace.agent.handling import BACK_S, Handling
from headrace.agent.hosting import Host
from headrace.agent.intake import read_mail
from headrace.agent.judging import Case
from headrace.agent.lanes import LanePull
from headrace.agent.ports import Asked, Port
from headrace.agent.questions import expired
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.contracts.mail import AgentState, Mail, MailReply
from headrace.mesh.consumer import Delivery
from headrace.mesh.mail import new_id
from headrace.mesh.settle import Reject
from headrace.mesh.tracing import trace_id

log = logging.getLogger("headrace.agent")

WINDOW: Final = {"work": 64, "control": 64, "reply": 256}
"""Messages asked for at once in each lane."""
AWAY_S: Final = 1.0
"""Delay of what could not be settled."""
LONGEST_S: Final = 24 * 3_600.0
"""How long a paused agent may go on with what it is doing."""


class AgentRunner:
    """Runs one agent over the connection of its host; `on_end` is called when another run has taken over."""

    def __init__(self, host: Host, agent: Agent, *, on_end: Callable[[AgentRunner], None]) -> None:
        self.agent = agent
        self.run = new_id()
        self._host = host
        self._on_end = on_end
        self._committer = Committer(host, agent, self.run)
        self._handling = Handling(host, agent, self._committer)
        self._waiting = asking.Waiting(agent.name)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes = {
            lane: LanePull(host.mesh, agent.name, lane, self._receive, window=window)
            for lane, window in WINDOW.items()
        }
        self._halted = False
        self._ended = False

    @property
    def record(self) -> AgentState:
        """The last committed state."""
        return self._committer.record

    @property
    def handled(self) -> int:
        """Mails whose handler returned, in this run."""
        return self._handling.handled

    @property
    def halted(self) -> bool:
        """Whether it handles nothing: stopped, paused, or taken over."""
        return self._halted

    @property
    def busy(self) -> bool:
        """Whether a handler is running."""
        return self._handling.busy

    # --- life ----------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Take over from any older run, send what that left, then take mail.

        Raise `Undecodable` (`state_mismatch`) if the stored state does not fit the agent's type.
        """
        record = await self._committer.take_over()
        self.agent.new_state(record.state)
        self._halted = record.stopped
        if record.stopped:
            log.warning(
                "agent is stopped: `headrace agent resume` lets it go on", extra={"agent": self.agent.name}
            )
        await self._lanes["control"].start()
        self._spawn(self._begin(), "begin")

    async def _begin(self) -> None:
        async with self._turn:
            await self._committer.send_out()
        if not self._halted:
            await self._lanes["reply"].start()
            await self._lanes["work"].start()

    async def stop(self, grace_s: float) -> None:
        """Pull no more, let the running handler finish within `grace_s`, give the rest back."""
        await self._halt(grace_s)
        await self._lanes["control"].stop()
        await self._cancel(set(self._tasks))
        with contextlib.suppress(HeadraceError):
            await self._committer.tidy()

    def halt_soon(self, grace_s: float) -> None:
        """Handle nothing more from now on; the running handler is cancelled when `grace_s` is over."""
        self._halted = True
        self._spawn(self._halt(grace_s), "control")

    async def resume(self) -> None:
        """Take mail again."""
        if not self._ended:
            self._halted = False
            self._handling.halting.clear()
            await self._lanes["reply"].start()
            await self._lanes["work"].start()

    async def _halt(self, grace_s: float) -> None:
        self._halted = True
        self._handling.halting.set()
        await self._lanes["work"].stop()
        busy = {task for task in self._tasks if task.get_name() == "mail"}
        late: set[asyncio.Task[None]] = set()
        if busy:
            _, late = await asyncio.wait(busy, timeout=grace_s)
        if self._halted:  # not resumed meanwhile
            await self._cancel(late)
            await self._lanes["reply"].stop()

    async def change(self, what: Change) -> AgentState:
        """Store a change of the state that no handler made."""
        return await self._committer.change(what)

    def give_up(self, mail: str | None, conversation: str | None) -> bool:
        """Cancel the running handler if it is about that."""
        return self._handling.give_up(mail, conversation)

    async def sweep(self) -> None:
        """Look for questions whose time is over; their notices come on the reply lane, as others do."""
        if not self._halted:
            await expired(self._host, self.agent.name, self.record)

    # --- one delivery --------------------------------------------------------------------------------
    def _receive(self, delivery: Delivery) -> None:
        self._host.leases.add(delivery)
        self._spawn(self._take(delivery), "control" if is_control(delivery) else "mail")

    async def _take(self, delivery: Delivery) -> None:
        settler = self._host.settler
        try:
            mail = read_mail(self._host.mesh.subjects, delivery)
            if mail.lane == "control":
                grace_s = self._host.settings.grace_s
                await obey(self, mail, grace_s=grace_s, longest_s=LONGEST_S)
                settler.ack_soon(delivery)
            elif mail.lane == "reply" and self._waiting.take(mail):
                settler.ack_soon(delivery)
            else:
                async with self._turn:
                    await self._handle(delivery, mail)
        except Undecodable as e:
            await settler.settle(delivery, Reject(str(e)))
        except (asyncio.CancelledError, Fenced):
            settler.nak(delivery, BACK_S)
            raise
        except HeadraceError as e:
            log.warning("a mail waits", extra={"agent": self.agent.name, "reason": str(e)[:300]})
            settler.nak(delivery, AWAY_S)

    async def _handle(self, delivery: Delivery, mail: Mail) -> None:
        case = self._handling.case(delivery, mail)
        if self._handling.is_settled(case):
            self._host.settler.ack_soon(delivery)
        elif self._halted:
            self._host.settler.nak(delivery, BACK_S)
        else:
            again = case.redriven or delivery.delivered > 1
            await self._handling.handle(case, RunnerPort(self._host, self._waiting, case, again=again))

    # --- tasks ---------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, Fenced):
            log.error("a part of an agent ended", extra={"agent": self.agent.name}, exc_info=error)
        elif not self._ended:
            self._halted = self._ended = True
            log.error("another run has taken over: this one ends", extra={"agent": self.agent.name})
            self._on_end(self)

    async def _cancel(self, tasks: set[asyncio.Task[None]]) -> None:
        others = [task for task in tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class RunnerPort:
    """What a context reaches through its runner. `again`: what it asks may have been asked before."""

    def __init__(self, host: Host, waiting: asking.Waiting, case: Case, *, again: bool) -> None:
        self._host = host
        self._waiting = waiting
        self._case = case
        self._again = again

    def again(self) -> Port:
        """The port of another run of the same handler."""
        return RunnerPort(self._host, self._waiting, self._case, again=True)

    async def call(self, asked: Asked) -> CallAnswer:
        """Ask the gateway, and return its last word."""
        return await asking.call(self._host.mesh, self._waiting, self._case.mail.to, asked)

    async def ask_now(self, question: Mail, timeout_s: float) -> MailReply:
        """Send a question and return its answer."""
        return await asking.ask_now(
            self._host.mesh, self._host.post, self._waiting, question, timeout_s, again=self._again
        )

    def record(self, context: Context[Any], kind: str, name: str | None, data: Any) -> None:
        """Note what the agent did."""
        mail = self._case.mail
        self._host.recorder(mail.to).record(
            context.conversation,
            kind,
            data,
            name=name,
            message=mail.id,
            hop=min(mail.hops, 10_000),
            trace_id=trace_id(context.traceparent),
        )
