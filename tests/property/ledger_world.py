"""A small world for the ledger's rules: gateways that die at any await, a callee that logs what it did, a clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from headrace.contracts.account import CallView, Fold
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.ledger import (
    BudgetHead,
    CallError,
    CallOutcome,
    CallUsage,
    Effect,
    Evidence,
    Intent,
    Roster,
)
from headrace.gateway.book import Book
from headrace.gateway.callees import Callee, Callees
from headrace.gateway.conduct import Conductor
from headrace.gateway.dialing import Attempted, Order
from headrace.gateway.open_calls import OpenCall
from headrace.gateway.records import Asked, Me
from headrace.gateway.resolve import Resolver
from headrace.gateway.verdicts import Seen
from headrace.gateway.way import Later
from headrace.mesh.callee_settings import CalleeSettings, PriceSettings
from tests.gateway.memory_ledger import MemoryLedger

EFFECTS: tuple[Effect, ...] = ("read", "idempotent", "cost_bearing", "money", "destructive")
MODES = (
    "answers",
    "unreachable",
    "refuses",
    "throttles",
    "fails",
    "breaks before",
    "breaks after",
    "cuts",
    "late",
)
"""What the callee does: `breaks before` and `breaks after` say whether it acted before the connection was lost."""
ASKABLE: tuple[Effect, ...] = ("money",)
"""Effects whose callee can be asked what became of a call."""
PRICE = PriceSettings(version="1", input_micro_per_mtok=1_000_000, output_micro_per_mtok=1_000_000)


class Log:
    """What the callee did, which no gateway can change: (call, attempt, remote key, acted)."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, str | None, bool]] = []
        self.bodies: dict[str, set[bytes]] = {}
        """What was asked, by call."""
        self.applied: dict[str, int] = {}
        """Remote keys that it has acted on: it acts once for each."""

    def receive(self, order: Order, *, acts: bool) -> None:
        self.entries.append((order.call, order.attempt, order.remote_key, acts))
        self.bodies.setdefault(order.call, set()).add(msgspec.json.encode(order.body.value))
        if acts:
            key = order.remote_key or f"{order.call}:{order.attempt}"
            self.applied[key] = self.applied.get(key, 0) + 1


class Dial:
    """The callee of one gateway's attempts; it looks at the ledger before it acts, to see that the intent was there."""

    def __init__(self, world: World, me: Me) -> None:
        self._world = world
        self._me = me

    async def dial(self, order: Order) -> Attempted:
        attempted = await self._dial(order)
        self._world.brought.append((self._me, order.call, order.attempt))
        return attempted

    async def _dial(self, order: Order) -> Attempted:
        world, mode = self._world, self._world.mode_of(order)
        await asyncio.sleep(0)
        if mode == "unreachable" or world.now_us >= order.until_us:
            return Attempted(seen=Seen.NOT_SENT, error=CallError(type="connect"), request_sent=False)
        world.check_intent(order)
        if mode in ("refuses", "throttles", "fails", "breaks before"):
            world.log.receive(order, acts=False)
            await asyncio.sleep(0)
            seen = {
                "refuses": Seen.REFUSED, "throttles": Seen.THROTTLED, "fails": Seen.SERVER_ERROR,
            }.get(mode, Seen.BROKEN)  # fmt: skip
            return Attempted(seen=seen, error=CallError(type="callee"))
        world.log.receive(order, acts=True)
        for _ in range(world.rng.randrange(8) if mode == "late" else 1):
            await asyncio.sleep(0)
        if mode == "breaks after":
            return Attempted(seen=Seen.BROKEN, error=CallError(type="reset"))
        usage = CallUsage(input_tokens=3, output_tokens=world.rng.randrange(40))
        outcome = CallOutcome(status=200, body={"answer": order.call}, partial=mode == "cuts")
        if mode == "cuts":
            return Attempted(seen=Seen.CUT, outcome=outcome, usage=usage, error=CallError(type="cut"))
        return Attempted(seen=Seen.ANSWERED, outcome=outcome, usage=usage)

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """What its log says, of callees that can be asked; now and then it says nothing."""
        await asyncio.sleep(0)
        if view.request.effect not in ASKABLE or self._world.rng.random() < 0.2:
            return None
        if not self._world.acted(view.call):
            return Attempted(seen=Seen.NOT_SENT, error=CallError(type="not_applied"))
        return Attempted(seen=Seen.ANSWERED, outcome=CallOutcome(status=200, body={"answer": view.call}))


class Statements:
    """The stream of evidence: whoever writes may die before it is stored."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def testify(self, evidence: Evidence) -> None:
        await asyncio.sleep(0)
        self._world.evidence.append(evidence)

    async def store(self, evidence: Evidence, **_: Any) -> int:
        await self.testify(evidence)
        return len(self._world.evidence)

    async def of(self, tenant: str, call: str) -> list[Evidence]:
        await asyncio.sleep(0)
        return [e for e in self._world.evidence if (e.tenant, e.call) == (tenant, call)]


class Calls:
    """What `OpenCalls` holds: every call that has no end yet."""

    def __init__(self, world: World) -> None:
        fold, last = Fold(), {}
        for seq, record in enumerate(world.ledger.log, 1):
            fold.take(record)
            if not isinstance(record, BudgetHead | Roster):
                last[record.tenant, record.call] = seq
        self.calls = {
            key: OpenCall(view, last[key])
            for key, view in fold.calls.items()
            if not view.terminal or any(a.held for a in view.attempts)
        }


class Open:
    """A gate that lets everything through."""

    async def admit(self, asked: Asked) -> Later | None:
        return None

    async def turn(self, callee: Callee) -> Callable[[], None]:
        return lambda: None


class Gateway:
    """One life of a gateway: everything that it runs ends with it."""

    def __init__(self, world: World, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.tasks: dict[asyncio.Task[Any], CallMessage] = {}
        self.side: set[asyncio.Task[Any]] = set()
        """Its recovery, and what it asks callees."""
        self.book = Book(world.ledger, together=world.together)
        self._world = world
        me, dial = Me(name, epoch), Dial(world, Me(name, epoch))
        self.resolver = Resolver(
            me=me,
            ledger=world.ledger,
            book=self.book,
            callees=world.callees,
            dialer=dial,
            evidence=Statements(world),  # type: ignore[arg-type]
            now_us=lambda: world.now_us,
        )
        self.conductor = Conductor(
            me=me,
            ledger=world.ledger,
            book=self.book,
            callees=world.callees,
            gate=Open(),
            dialer=dial,
            testify=Statements(world).testify,
            alive=world.alive,
            now_us=lambda: world.now_us,
            pause=lambda _: asyncio.sleep(0),
        )

    def recover(self) -> None:
        """What a start does with the calls that an older life left open."""
        self._begin(self.resolver.recover(Calls(self._world)))  # type: ignore[arg-type]

    def sweep(self) -> None:
        """Ask for everything that is in doubt."""
        for call in Calls(self._world).calls.values():
            if call.view.last.state == "in_doubt":
                self._begin(self.resolver._ask(call))

    def decide(self, call: str, *, applied: bool) -> None:
        """An operator says what became of a call."""
        self._begin(self.resolver.decide("t", call, applied=applied, cost_micro=None, why="seen", by="op"))

    def _begin(self, work: Any) -> None:
        task = self._world.loop.create_task(work)
        self.side.add(task)

    def die(self) -> list[CallMessage]:
        """End at once: nothing more of it runs, and its messages are delivered to others."""
        writer = self.book._writer
        for task in (*self.tasks, *self.side, *self.book._alone, *([writer] if writer else [])):
            task.cancel()
        messages = [message for task, message in self.tasks.items() if not task.done()]
        self.tasks = {}
        return messages


class World:
    """Gateways, messages, callee, ledger and clock; `turns` lets everything run for a while."""

    def __init__(self, seed: int, *, limit: int = 10_000, tokens: int = 10**9, gateways: int = 2) -> None:
        self.rng = random.Random(seed)
        self.together = seed % 2 == 0
        """Whether gateways write what moves no budget in batches, too: as they do where the broker syncs."""
        self.loop = asyncio.new_event_loop()
        self.now_us = 1_000_000_000
        self.ledger = MemoryLedger()
        self.log = Log()
        self.evidence: list[Evidence] = []
        self.brought: list[tuple[Me, str, int]] = []
        """Attempts whose answer reached the gateway that had made them."""
        self.mode = "answers"
        self.modes: dict[str, str] = {}
        self.callees = Callees(
            {
                effect: CalleeSettings(
                    kind="openai", effect=effect, base_url="http://callee", timeout_s=10, max_output_tokens=20,
                    price=PRICE, retry_cap_s=60,
                )
                for effect in EFFECTS
            }
        )  # fmt: skip
        self.epochs: Counter[str] = Counter()
        self.gateways: dict[str, Gateway] = {}
        self.names = [f"g{n}" for n in range(gateways)]
        self.waiting: list[CallMessage] = []
        self.answers: list[tuple[CallMessage, CallAnswer]] = []
        self.asked = 0
        for name in self.names:
            self.start(name)
        from headrace.gateway.budgets import Budgets

        budgets = Budgets(self.ledger)
        for unit, bound in (("calls", limit), ("micro", 10**9), ("tokens", tokens)):
            self.run(budgets.set("t", unit, unit=unit, limit=bound))  # type: ignore[arg-type]

    # --- what happens ------------------------------------------------------------------------------
    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def start(self, name: str) -> None:
        self.epochs[name] += 1
        self.gateways[name] = Gateway(self, name, self.epochs[name])

    def crash(self, name: str) -> None:
        """SIGKILL and a restart under the same name."""
        self.turns(0)
        self.waiting += self.gateways[name].die()
        self.turns(2)
        self.start(name)
        self.gateways[name].recover()

    def ask(self, effect: Effect, key: str, body: int = 0) -> None:
        self.asked += 1
        self.waiting.append(
            CallMessage(
                request=f"r{self.asked}", callee=effect, tenant="t", agent="a", key=key,
                body=Raw(b'{"messages":[{"role":"user","content":"%d"}]}' % body),
            )
        )  # fmt: skip

    def deliver(self) -> None:
        """Hand each waiting message to a gateway."""
        for message in self.waiting:
            gateway = self.gateways[self.rng.choice(self.names)]
            gateway.tasks[self.loop.create_task(gateway.conductor.conduct(message))] = message
        self.waiting = []

    def turns(self, n: int) -> None:
        """Let `n` turns of the loop pass, and take the answers that are there."""
        for _ in range(n):
            self.run(asyncio.sleep(0))
        for gateway in self.gateways.values():
            for task in [t for t in gateway.side if t.done()]:
                gateway.side.discard(task)
                if not task.cancelled() and not isinstance(error := task.exception(), HeadraceError | None):
                    raise error
            for task in [t for t in gateway.tasks if t.done()]:
                message = gateway.tasks.pop(task)
                if task.cancelled() or isinstance(task.exception(), Unavailable):
                    self.waiting.append(message)
                elif task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
                elif isinstance(answer := task.result(), Later):
                    self.waiting.append(message)
                else:
                    self.answers.append((message, answer))

    def settle(self) -> None:
        """No more trouble: everything that waits is brought to its end."""
        self.mode, self.modes, self.ledger.trouble = "answers", {}, lambda: ""
        for _ in range(60):
            self.deliver()
            for gateway in self.gateways.values():
                gateway.sweep()
            self.turns(60)
            self.now_us += 20_000_000
            if (
                not self.waiting
                and not any(g.tasks or g.side for g in self.gateways.values())
                and not self.askable()
            ):
                return
        raise AssertionError(f"{len(self.waiting)} calls never end")

    # --- what is seen ------------------------------------------------------------------------------
    def mode_of(self, order: Order) -> str:
        return self.modes.get(order.call, self.mode)

    def acted(self, call: str) -> int:
        """How often the callee acted on a call."""
        return sum(acts for c, _, _, acts in self.log.entries if c == call)

    def askable(self) -> bool:
        """Whether a call is in doubt whose callee would say more."""
        return any(
            c.view.last.state == "in_doubt" and c.view.request.effect in ASKABLE
            for c in Calls(self).calls.values()
        )

    async def alive(self, owner: str, epoch: int) -> bool:
        await asyncio.sleep(0)
        return self.epochs[owner] <= epoch

    def fold(self) -> Fold:
        fold = Fold()
        for record in self.ledger.log:
            fold.take(record)
        return fold

    def check_intent(self, order: Order) -> None:
        """Invariant 1: who reaches the callee has a durable intent."""
        assert any(
            isinstance(r, Intent) and (r.call, r.attempt) == (order.call, order.attempt)
            for r in self.ledger.log
        ), f"attempt {order.attempt} of call {order.call} was dialed before its intent"
