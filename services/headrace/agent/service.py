"""The process that runs agents: any number of them over one connection, each with its own lanes, state and order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from headrace.agent.agent import Agent
from headrace.agent.capture import Capture, captures
from headrace.agent.errors import Fenced
from headrace.agent.hosting import Host
from headrace.agent.runner import AgentRunner
from headrace.agent.showing import Showing
from headrace.contracts.errors import Conflict, HeadraceError, InvalidInput, Unavailable
from headrace.contracts.subjects import MAIL_LANES
from headrace.mesh.checks.start import check_start
from headrace.mesh.connection import Mesh
from headrace.mesh.group_store import GroupStore
from headrace.mesh.jsapi import consumer_info
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.mail import Post
from headrace.mesh.provision import create_consumer
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler

log = logging.getLogger("headrace.agent")

NAME_LENGTH: Final = 110
"""What is left of a name's length when the threads of a process add to it."""
SWEEP_S: Final = 1.0
"""How often questions without an answer are looked at."""


class AgentService(Service):
    """Runs `agents`; each restarts alone elsewhere, since all that one knows is in its committed state.

    Start: make the mailboxes that are missing; take over each agent, so that an older run of it is fenced; send what
    that left in its outbox; take mail. A stop goes in this order:

    1. pull no more work; handlers that run finish within `grace_s`, their leases renewed; the rest is given back
    2. what was sent is noted as sent; what was recorded is stored
    3. end the leases, close the connection

    The service ends by itself, with a failure, when every one of its agents has been taken over.
    """

    name = "agent"

    def __init__(
        self,
        settings: Settings,
        agents: Sequence[Agent],
        *,
        capture: bool = True,
    ) -> None:
        super().__init__(settings)
        names = [agent.name for agent in agents]
        if not names or len(set(names)) != len(names):
            raise InvalidInput("a host runs one agent or more, each of another name", field="agents")
        self.agents = list(agents)
        self.runners: dict[str, AgentRunner] = {}
        self._capture = capture
        self._captures: dict[str, Capture] = {}
        # Its inbox has this name: so permissions can keep agents from listening to one another's deliveries.
        self.name = f"agent-{names[0]}"[:NAME_LENGTH]
        self._leases = LeaseKeeper(settings, self.name)
        self._showing: Showing | None = None
        self._fenced: set[str] = set()

    async def on_start(self) -> None:
        """Take over every agent and begin."""
        mesh, topology = self.mesh, self.mesh.topology
        await check_start(
            mesh, (topology.mail, topology.agents, topology.calls, topology.replies, topology.dead)
        )
        await self._leases.start()
        self.spawn(self._leases.watch(), "leases")
        await asyncio.gather(*(open_mailbox(mesh, agent.name) for agent in self.agents))
        if self._capture:
            self._captures = captures(mesh, [agent.name for agent in self.agents])
        for capturing in self._captures.values():
            capturing.start()
        host = Host(
            mesh=mesh,
            settings=self.settings,
            leases=self._leases,
            settler=Settler(mesh, self._leases),
            post=Post(mesh, group=GroupStore(mesh, topology.mail)),
            states=GroupStore(mesh, topology.agents),
            recorders=dict(self._captures),
        )
        for agent in self.agents:
            self.runners[agent.name] = AgentRunner(host, agent, on_end=self._on_end)
        await asyncio.gather(*(runner.start() for runner in self.runners.values()))
        self.spawn(self._sweep(), "questions")
        self._showing = Showing(mesh, self.runners)
        await self._showing.start()
        self.spawn(self._showing.run(), "presence")
        log.info("agents live", extra={"agents": len(self.runners)})

    async def on_drain(self) -> None:
        """Steps 1 and 2 of a stop."""
        await asyncio.gather(*(runner.stop(self.settings.grace_s) for runner in self.runners.values()))
        await asyncio.gather(*(capturing.stop() for capturing in self._captures.values()))
        if self._showing is not None:
            await self._showing.stop()

    async def on_stop(self) -> None:
        """Step 3 of a stop."""
        await self._leases.stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for runner in list(self.runners.values()):
                try:
                    await runner.sweep()
                except HeadraceError as e:
                    log.warning("questions are looked at later", extra={"reason": str(e)[:200]})

    def _on_end(self, runner: AgentRunner) -> None:
        self._fenced.add(runner.agent.name)
        self.spawn(self._finish(runner), f"end of {runner.agent.name}")

    async def _finish(self, runner: AgentRunner) -> None:
        await runner.stop(0.0)
        if len(self._fenced) == len(self.runners):
            raise Fenced("every agent of this process has been taken over by another one")


async def open_mailbox(mesh: Mesh, agent: str) -> None:
    """Make the consumers of an agent's lanes; what exists otherwise is a `Conflict`."""
    for lane in MAIL_LANES:
        spec = mesh.topology.mail_consumer(agent, lane)
        try:
            await create_consumer(mesh, spec)
        except Unavailable as e:
            if e.code != "denied":  # a user of least privilege binds to what an operator has made
                raise
    config: dict[str, Any] = (await consumer_info(mesh, mesh.topology.mail, f"{agent}-work"))["config"]
    if config.get("max_ack_pending") != 1:
        stream, consumer, found = mesh.topology.mail, f"{agent}-work", config.get("max_ack_pending")
        msg = (
            f"consumer {stream}/{consumer} leases {found} messages at once: a sender's order would not hold. Mend it: "
            f"`nats consumer edit {stream} {consumer} --max-pending 1`"
        )
        raise Conflict(msg, code="drift")
