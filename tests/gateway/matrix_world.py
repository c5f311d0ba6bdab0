"""One world of the matrix: calls of every effect to a callee in every mood, and gateways that die at one point.

All calls are asked at once. `hold` points keep whoever passes until as many are there as can be, and then the process
kills itself: so each effect and each mood is at that very point when it dies. It is killed there once more, then
started for good; when nothing moves any more the witness is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.contracts.ledger import EFFECTS
from headrace.gateway.budgets import Budgets
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import StreamLedger
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import Part
from tests.gateway.fleet import HI, Fleet
from tests.gateway.invariants import KEYED, Again, Restart, Witness

TIMEOUT_S = 1.5
BEHAVIOURS: dict[str, dict[str, Any]] = {
    "answers": {},
    "streams": {"behave": "stream", "stream": True},
    "hangs": {"behave": "hangs"},
    "closes before reading": {"behave": "closes before reading"},
    "closes after reading": {"behave": "closes"},
    "cuts mid-stream": {"behave": "cuts", "stream": True},
    "429": {"behave": "429"},
    "500": {"behave": "500"},
    "late": {"behave": "late", "delay": 0.3},
}


class Point(NamedTuple):
    """Where a process dies. `passes`: how many of the calls of a world come there at least, each for the first time."""

    name: str
    said: str
    how: str
    passes: int = 1


ALL = len(EFFECTS) * len(BEHAVIOURS)
ANSWERED = len(EFFECTS) * 6
POINTS = (
    Point("call-accepted", "the call is stored, its asker not answered", "hold", ALL),
    Point("intent-before-publish", "before the intent is published", "hold", ALL),
    Point("intent-stored", "the intent is stored, its PubAck not seen", "pass", 2),
    Point("intent-acked", "the intent is acked, nothing is connected", "hold", ALL),
    Point("call-half-sent", "a part of the request is written", "hold", ALL),
    Point("call-sent", "all of the request is written, no answer", "hold", ALL),
    Point("call-headers-seen", "the answer's headers are read", "hold", ANSWERED),
    Point("call-mid-stream", "a part of the answer's stream is read", "hold", len(EFFECTS) * 2),
    Point("call-answered", "all is read, no completion published", "hold", ALL),
    Point("end-stored", "the end is stored, its PubAck not seen", "pass", 2),
    Point("end-acked", "the end is acked, the asker not answered", "hold", ALL),
    Point("call-replied", "the asker is answered, the request not acked", "hold", ALL - 1),
    Point("recovery-classified", "a restarted gateway has put the first open call in doubt", "recovery", 1),
    Point("resolver-asked", "the resolver has the callee's word and has noted nothing", "recovery", 1),
    Point("resolver-noted", "the resolver has noted the callee's word, the call is still in doubt", "recovery", 1),
    Point("broker, accepting", "the broker dies while calls are accepted, the gateway lives", "broker", 1),
    Point("broker, calling", "the broker dies while calls are under way, the gateway lives", "broker", ALL // 2),
    Point("paused", "the gateway is stopped past its leases, another takes over, and it goes on", "pause", ALL // 2),
)  # fmt: skip


class Call(NamedTuple):
    """One call of a world. `name` is what the callee knows it by."""

    effect: str
    behaviour: str
    key: str
    call: str
    name: str
    body: dict[str, Any]


class Row(NamedTuple):
    """What became of one call."""

    effect: str
    behaviour: str
    state: str
    heard: int
    acted: int


class MatrixWorld(Fleet):
    """A callee, a broker (the caller's) and gateways, for one point."""

    def __init__(self, server: NatsServer, mesh: Mesh, folder: Path, *, gateways: int = 1) -> None:
        super().__init__(
            server, mesh, folder, gateways=gateways, timeout_s=TIMEOUT_S, settings="max_attempts = 2\n"
        )
        self.calls = [
            Call(effect, behaviour, key, call, f"hr-{call}" if effect in KEYED else key, body)
            for effect in EFFECTS
            for behaviour, extra in BEHAVIOURS.items()
            for key in [f"{effect}-{behaviour}".replace(" ", "-")]
            for call in [call_id("t", "a", key)]
            for body in [{**HI, "id": key, **extra}]
        ]
        self.again: list[Again] = []
        self.restarts: list[Restart] = []
        self.rejected: set[str] = set()
        self.rebuilt: list[bool] = []
        self.quiet_s = 0.4
        self.died_there = 0
        """How often a process killed itself at the point."""

    # --- what happens ------------------------------------------------------------------------------
    async def play(self, point: Point, *, seed: int = 0, broker: bool = False) -> None:
        """Everything, until all is at rest. `broker`: the broker is killed whenever a gateway dies."""
        rng = random.Random(f"{point.name} {seed}")
        await self._set_budgets()
        match point.how:
            case "hold" | "pass":
                await self._killed(point, rng, broker)
            case "recovery":
                await self._killed_in_recovery(point, rng, broker)
            case "broker":
                await self._without_broker(point)
            case _:
                await self._paused(point)
        await self.mend()
        await self.rest()
        await self._ask_again()
        await self._restart()

    async def _set_budgets(self) -> None:
        budgets = Budgets(StreamLedger(self.mesh))
        for unit in ("calls", "tokens", "micro"):
            await budgets.set("t", unit, unit=unit, limit=10**9)  # type: ignore[arg-type]
        await budgets.set("t", "nothing", unit="calls", limit=0, agent="poor")

    async def _killed(self, point: Point, rng: random.Random, broker: bool) -> None:
        hold = ":hold" if point.how == "hold" else ""
        passes = point.passes if len(self.gateways) == 1 else max(1, point.passes // 3)
        if point.how == "pass":
            passes = rng.randint(1, passes)
        first, *others = self.gateways
        for other in others:
            other.start()
        first.start(crash_at=f"{point.name}:{passes}{hold}")
        await self.all_ready()
        async with self._asking():
            await self._dies(first, 15)
        if broker:
            await self.restart_broker()
        if point.name != "call-accepted":  # nobody asks any more
            first.start(crash_at=f"{point.name}:{rng.randint(1, 3)}")
            await first.ready()
            await self._dies(first, 4)
            if broker:
                await self.restart_broker()

    async def _killed_in_recovery(self, point: Point, rng: random.Random, broker: bool) -> None:
        first = self.gateways[0]
        for part in self.gateways:
            part.start()
        await self.all_ready()
        async with self._asking():
            await self.until(lambda: len(self.callee.entries()) >= ALL // 2)
            first.kill()
        for nth in (1, rng.randint(1, 3)):
            first.start(crash_at=f"{point.name}:{nth}")
            await first.ready()
            await self._dies(first, 6)
            if broker:
                await self.restart_broker()

    async def _without_broker(self, point: Point) -> None:
        for part in self.gateways:
            part.start()
        await self.all_ready()
        async with self._asking():
            await self.until(lambda: len(self.callee.entries()) >= point.passes)
            await self.restart_broker()

    async def _paused(self, point: Point) -> None:
        self.quiet_s = 3.0
        first = self.gateways[0]
        first.start()
        await first.ready()
        async with self._asking():
            await self.until(lambda: len(self.callee.entries()) >= point.passes)
            assert first.process is not None
            first.process.send_signal(signal.SIGSTOP)
        try:
            if len(self.gateways) == 1:
                self.gateways.append(self.gateway("g2"))
            for other in self.gateways[1:]:
                other.start()
                await other.ready()
            await self.until(self._nothing_open)
        finally:
            first.process.send_signal(signal.SIGCONT)

    async def _dies(self, part: Part, within_s: float) -> None:
        if await part.died(within_s) is None:
            part.kill()
        else:
            assert part.code == -signal.SIGKILL, part.tail()
            self.died_there += 1

    # --- asking ------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Every call is asked, and three that are to be refused, while the block runs; then nobody waits any more."""
        tasks = [asyncio.create_task(self.ask(c.effect, c.key, c.body, trace=c.key)) for c in self.calls]
        self.rejected |= {call_id("t", "poor", "p"), call_id("t", "a", "unknown")}
        tasks += [
            asyncio.create_task(self.ask("money", "p", {**HI, "id": "refused-1"}, agent="poor")),
            asyncio.create_task(self.ask("unknown", "unknown", {**HI, "id": "refused-2"})),
            asyncio.create_task(self._ask_without_key()),
        ]
        try:
            yield
        finally:
            await asyncio.wait(tasks, timeout=0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_without_key(self) -> None:
        if (answer := await self.ask("money", None, {**HI, "id": "refused-3"})) is not None:
            self.rejected.add(answer.call_id)

    async def _ask_again(self) -> None:
        """At rest: each call with another body; and with its own, where that must change nothing."""
        fold = await self.fold()
        heard = self.heard()
        before = {c.call: heard.count(c.name) for c in self.calls}

        async def ask(c: Call, other_body: bool) -> None:
            answer = None
            while answer is None:
                body = c.body | ({"other": 1} if other_body else {})
                answer = await self.ask(c.effect, c.key, body, trace=f"{c.key} again")
            state = fold.calls["t", c.call].state
            self.again.append(Again(c.call, other_body, state, answer, before[c.call], -1))

        await asyncio.gather(*(ask(c, True) for c in self.calls))
        await asyncio.gather(
            *(ask(c, False) for c in self.calls if not _may_run_again(fold.calls["t", c.call]))
        )
        heard = self.heard()
        names = {c.call: c.name for c in self.calls}
        self.again = [a._replace(heard_after=heard.count(names[a.call])) for a in self.again]

    async def _restart(self) -> None:
        """At rest: all gateways are killed and started again, and have read the ledger."""
        await self.rest()
        before, heard = len(await self.ledger()), len(self.heard())
        for part in self.gateways:
            part.kill()
        await self.mend()
        await self.rest()
        self.restarts.append(Restart(before, len(await self.ledger()), heard, len(self.heard())))

    async def rebuild(self) -> None:
        """Let a data plane read the ledger, and make its tables again from it."""
        completion = Part("completion", self.gateways[0].log.parent)
        completion.start()
        try:
            await completion.ready()
            for _ in range(2):  # the first finds them on their way
                answer = msgspec.json.decode(await call_api(self.mesh, "rebuild", {}, timeout_s=30))
                await asyncio.sleep(0.5)
            self.rebuilt.append(answer["identical"])
        finally:
            completion.kill()

    # --- until nothing moves -----------------------------------------------------------------------
    async def rest(self) -> None:
        """Return when no request waits, no call is open, the resolver has nothing more to find out, and all is quiet.

        A gateway that was paused goes on with what it had in hand, which no request stands for any more.
        """
        last, since = (-1, -1), time.monotonic()

        async def quiet() -> bool:
            nonlocal last, since
            if not await self._at_rest():
                return False
            now = (len(await self.ledger()), len(self.callee.entries()))
            if now != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= self.quiet_s

        await self.until(quiet)

    async def _at_rest(self) -> bool:
        state = (await jsapi.stream_info(self.mesh, self.mesh.topology.calls))["state"]
        return not state["messages"] and await self._nothing_open(resolved=True)

    async def _nothing_open(self, *, resolved: bool = False) -> bool:
        fold = await self.fold()
        return all(
            view.state in ("completed", "failed", "in_doubt")
            and not (resolved and view.state == "in_doubt" and view.request.effect == "money")
            for view in fold.calls.values()
        )

    # --- what is seen ------------------------------------------------------------------------------
    async def seen(self) -> Witness:
        """All that was seen."""
        return await self.witness(
            {c.call: c.name for c in self.calls},
            again=self.again,
            restarts=self.restarts,
            rejected=self.rejected,
            rebuilt=self.rebuilt,
        )

    def rows(self, w: Witness) -> list[Row]:
        """What became of each call."""
        found: list[Row] = []
        for c in self.calls:
            view = w.fold.calls.get(("t", c.call))
            heard = len(w.heard.get(c.call, []))
            state = view.state if view else "never accepted"
            found.append(Row(c.effect, c.behaviour, state, heard, w.acted(c.call)))
        return found


def _may_run_again(view: Any) -> bool:
    """Whether asking for a call at rest is an order to try it again."""
    end = view.last.end
    return (view.state == "failed" and end.retryable) or (
        view.state == "in_doubt" and view.request.effect in ("read", "idempotent")
    )


async def run_world(
    point: Point,
    folder: Path,
    *,
    seed: int = 0,
    gateways: int = 1,
    broker: bool = False,
    rebuild: bool = False,
) -> tuple[Witness, list[Row], int]:
    """A world of its own, with its broker: the witness, what became of each call, and how often one died there.

    It leaves no process behind, and prints what the gateways said last if something breaks.
    """
    server = NatsServer(folder / "nats", durability="relaxed")
    await asyncio.to_thread(server.start)
    try:
        settings = Settings(url=server.url, dir=str(folder), durability="relaxed", ack_wait_s=1.0)
        async with await Mesh.connect(settings, name="matrix") as mesh:
            await provision(mesh)
            world = MatrixWorld(server, mesh, folder / "world", gateways=gateways)
            try:
                await world.play(point, seed=seed, broker=broker)
                if rebuild:
                    await world.rebuild()
                witness = await world.seen()
                return witness, world.rows(witness), world.died_there
            except BaseException:
                print(world.logs())
                raise
            finally:
                world.stop()
    finally:
        server.kill()
