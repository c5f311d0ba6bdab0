"""How others find the agents of a process: a card for each, and a word every few seconds that they run.

Neither is needed for anything that an agent does, so no trouble with them stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from headrace.agent.agent import Agent
from headrace.agent.cards import card_of
from headrace.agent.runner import AgentRunner
from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.directory import EVERY_S, Presence, put_card

log = logging.getLogger("headrace.agent")


class Showing:
    """Shows the agents of one process."""

    def __init__(self, mesh: Mesh, runners: Mapping[str, AgentRunner]) -> None:
        self._mesh = mesh
        self._runners = runners
        self._presences = {name: Presence(mesh, name, life=runner.run) for name, runner in runners.items()}

    async def start(self) -> None:
        """Put up the cards, and say that all run."""
        await asyncio.gather(*(self._put(runner.agent) for runner in self._runners.values()))
        await self._say()

    async def run(self) -> None:
        """Say it again and again."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self._say()

    async def stop(self) -> None:
        """Say that they run no more. The cards stay: so do the mailboxes."""
        for presence in self._presences.values():
            await presence.gone()

    async def _put(self, agent: Agent) -> None:
        try:
            await put_card(self._mesh, card_of(agent, self._mesh.settings))
        except HeadraceError as e:
            extra = {"agent": agent.name, "reason": str(e)[:200]}
            log.warning("the agent's card could not be put up; it works without", extra=extra)

    async def _say(self) -> None:
        for name, presence in self._presences.items():
            presence.stopped = self._runners[name].halted
            await presence.say()
