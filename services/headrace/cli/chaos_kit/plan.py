"""Which faults, on whom and when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

Kind = Literal["kill", "pause", "disk-full", "queue-full", "delay", "duplicate"]

BROKER, COMPLETION, GATEWAY, WORKER, SUBMIT = "broker", "completion", "gateway", "worker", "submit"
COMPONENTS: Final = (WORKER, COMPLETION, BROKER, GATEWAY, SUBMIT)
KILLED: Final = (WORKER, COMPLETION, BROKER)
"""Those that are killed as often as was asked for; gateway and submitter now and then."""
FIRST, LAST = 0.03, 0.88
"""Share of the run before the first and after the last fault."""
LONG: Final = 1.5
"""A long pause, in `ack_wait`s: whoever is paused has lost its leases when it wakes."""


class Fault(Struct, frozen=True, kw_only=True):
    """One fault: due at the share `at` of the run (of its time or of its items, whichever is sooner).

    `victim` is a process (`worker-2`, `completion`, …) or, where no process suffers, a stream (`tasks`, `results`).
    `seconds` is how long it lasts, `count` how many messages it takes; 0 where that means nothing.
    """

    at: float
    kind: Kind
    victim: str
    seconds: float = 0.0
    count: int = 0

    @property
    def component(self) -> str:
        """The victim's kind."""
        return WORKER if self.victim.startswith("worker-") else self.victim


def even_kills(each: int) -> dict[str, int]:
    """`each` kills of worker, completion and broker; a third of that of the gateway and the submitter."""
    some = -(-each // 3)
    return dict.fromkeys(KILLED, each) | {GATEWAY: some, SUBMIT: some} if each else {}


def make_plan(
    seed: int, kills: Mapping[str, int], *, workers: int, ack_wait_s: float, only_kills: bool = False
) -> list[Fault]:
    """The faults of a run in the order in which they are due: so many kills by component, and the others among them.

    Pauses, disk, queue and deliveries come about once for each three kills of a component. The submitter is killed in
    the first half, while it still has something to store.
    """
    rng = random.Random(seed)
    drawn = [
        _draw("kill", who, rng, workers, ack_wait_s)
        for who, n in kills.items()
        if who != SUBMIT
        for _ in range(n)
    ]
    rounds = -(-max(kills.values(), default=0) // 3)
    if not only_kills:
        for _ in range(rounds):
            drawn.append(_pause(_worker(rng, workers), LONG * ack_wait_s))
            drawn += [_draw("pause", who, rng, workers, ack_wait_s) for who in (*KILLED, GATEWAY)]
            drawn.append(_draw("disk-full", COMPLETION, rng, workers, ack_wait_s))
            for kind in ("queue-full", "delay"):
                drawn.append(_draw(kind, rng.choice(("tasks", "results")), rng, workers, ack_wait_s))
            drawn.append(_draw("duplicate", "results", rng, workers, ack_wait_s))
    rng.shuffle(drawn)
    width = (LAST - FIRST) / max(1, len(drawn))
    planned = [_at(fault, FIRST + (i + rng.uniform(0.1, 0.9)) * width) for i, fault in enumerate(drawn)]
    planned += [
        Fault(at=rng.uniform(FIRST / 3, LAST / 2), kind="kill", victim=SUBMIT)
        for _ in range(kills.get(SUBMIT, 0))
    ]
    return sorted(planned, key=lambda fault: fault.at)


def _draw(kind: Kind, who: str, rng: random.Random, workers: int, ack_wait_s: float) -> Fault:
    victim = _worker(rng, workers) if who == WORKER else who
    if kind == "kill":
        return Fault(at=0.0, kind=kind, victim=victim)
    if kind == "pause":
        # Nothing renews a lease that a paused broker could let lapse: a short one is as good.
        longest = 0.7 if who == BROKER else LONG
        return _pause(victim, rng.uniform(0.1, longest) * ack_wait_s)
    if kind in {"delay", "duplicate"}:
        return Fault(at=0.0, kind=kind, victim=victim, count=rng.randint(1, 20 if kind == "delay" else 5))
    return Fault(at=0.0, kind=kind, victim=victim, seconds=round(rng.uniform(0.2, 0.8) * ack_wait_s, 2))


def _pause(victim: str, seconds: float) -> Fault:
    return Fault(at=0.0, kind="pause", victim=victim, seconds=round(seconds, 2))


def _worker(rng: random.Random, workers: int) -> str:
    return f"worker-{rng.randint(1, workers)}"


def _at(fault: Fault, at: float) -> Fault:
    return Fault(
        at=round(at, 4), kind=fault.kind, victim=fault.victim, seconds=fault.seconds, count=fault.count
    )
