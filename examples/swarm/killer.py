"""Kills, drawn by a seed: who, and after how much of the work. So they hit a swarm at work, however fast it is."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence

from places import BROKER, Places, say
from reckoning import Progress

LAST = 0.9
"""Share of the work by which the last kill comes: it has to hit something."""
LONGEST_MOMENT_S = 0.05


class Kill:
    """One kill: who, after how many messages were handled, and how much later."""

    def __init__(self, victim: str, mark: int, moment_s: float) -> None:
        self.victim = victim
        self.mark = mark
        self.moment_s = moment_s


def draw(seed: int, count: int, victims: Sequence[str], work: int) -> list[Kill]:
    """`count` kills within a job of at least `work` messages, in their order."""
    rng = random.Random(seed)
    marks = sorted(rng.randint(1, max(1, int(LAST * work))) for _ in range(count))
    return [Kill(rng.choice(victims), mark, rng.uniform(0.0, LONGEST_MOMENT_S)) for mark in marks]


async def kill_all(places: Places, plan: Sequence[Kill], progress: Progress) -> int:
    """Kill as planned; return how many were killed."""
    began = time.monotonic()
    for done, kill in enumerate(plan, 1):
        await progress.reaches(kill.mark)
        await asyncio.sleep(kill.moment_s)
        await asyncio.to_thread(places.kill, kill.victim)
        at_s = time.monotonic() - began
        say(
            f"  {at_s:5.1f} s  {kill.victim}: SIGKILL with {progress.handled} messages handled ({done} of {len(plan)})"
        )
    return len(plan)


async def revive(places: Places) -> int:
    """Start again whoever ends by itself, as a supervisor does; cancelled, return how many died at a crash point.

    The others could not start, because the broker was just away.
    """
    died = 0
    try:
        while True:
            for part in places.parts.values():
                code = part.revive()
                if code is not None:
                    say(f"  {part.name} {'died' if code < 0 else 'ended'}, and is started again")
                    died += code == -signal.SIGKILL
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return died


def victims(agents: Sequence[str], others: Sequence[str], *, everything: bool) -> list[str]:
    """Who may be killed."""
    return [*agents, *others, BROKER] if everything else list(agents)
