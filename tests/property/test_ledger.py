"""The invariants of governed calls over thousands of histories: any await may be the last of a gateway."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contracts.account import Fold
from headrace.contracts.ledger import AttemptFailed, BudgetHead, Completed, Failed, Roster
from headrace.gateway import book
from tests.property.ledger_world import EFFECTS, MODES, World

EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "150"))
NON_IDEMPOTENT = ("cost_bearing", "money", "destructive")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "backoff_s", lambda *_, **__: 0.0)


class GovernedCalls(RuleBasedStateMachine):
    """Asks, deliveries, deaths, lost answers and a callee in every mood, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[tuple[str, str], int] = {}
        self.checked = 0
        self.so_far = Fold()

    @initialize(seed=st.integers(0, 2**32), limit=st.sampled_from([3, 10_000]), gateways=st.integers(1, 3))
    def begin(self, seed: int, limit: int, gateways: int) -> None:
        self.limit = limit
        self.world = World(seed, limit=limit, gateways=gateways)

    @rule(effect=st.sampled_from(EFFECTS), key=st.integers(0, 3), body=st.sampled_from([0, 0, 0, 1]))
    def ask(self, effect: str, key: int, body: int) -> None:
        self.world.ask(effect, f"{effect}-{key}", body)  # type: ignore[arg-type]

    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @rule(n=st.integers(1, 25))
    def turns(self, n: int) -> None:
        self.world.turns(n)

    @rule(which=st.integers(0, 2))
    def crash(self, which: int) -> None:
        self.world.crash(self.world.names[which % len(self.world.names)])

    @rule(mode=st.sampled_from(MODES))
    def mood(self, mode: str) -> None:
        self.world.mode = mode

    @rule(seconds=st.sampled_from([1, 30]))
    def tick(self, seconds: int) -> None:
        self.world.now_us += seconds * 1_000_000

    @rule(kind=st.sampled_from(["", "ack lost", "away"]))
    def trouble(self, kind: str) -> None:
        rng = self.world.rng
        self.world.ledger.trouble = lambda: kind if kind and rng.random() < 0.3 else ""

    # --- at every moment ---------------------------------------------------------------------------
    @invariant()
    def budgets_hold(self) -> None:
        """7 and 9: at the end of every batch the heads are what the records say, and within the limit."""
        if not hasattr(self, "world"):
            return
        ledger = self.world.ledger
        while self.checked < len(ledger.log):
            self.so_far.take(ledger.log[self.checked])
            self.checked += 1
            if self.checked in ledger.batches:
                assert self.so_far.differences() == []
                for (_, name), periods in self.so_far.accounts.items():
                    for account in periods.values():
                        if name == "calls":
                            assert account.posted + account.held <= self.limit + account.overrun

    @invariant()
    def one_entry_an_attempt(self) -> None:
        """2 and 3: the callee hears of an attempt once, and of a call that must not be repeated once at all."""
        if not hasattr(self, "world"):
            return
        heard = Counter((call, attempt) for call, attempt, _, _ in self.world.log.entries)
        assert all(n == 1 for n in heard.values()), heard
        fold = self.world.fold()
        for (_, call), view in fold.calls.items():
            entries = [e for e in self.world.log.entries if e[0] == call]
            acted = sum(e[3] for e in entries)
            if view.request.effect in ("money", "destructive"):
                assert len([e for e in entries if e[3]]) <= 1, (call, entries)
            if view.request.effect == "cost_bearing":
                assert acted <= 1, (call, entries)

    # --- at rest -----------------------------------------------------------------------------------
    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.at_rest()
        finally:
            for gateway in self.world.gateways.values():
                gateway.die()
            self.world.turns(2)
            self.world.loop.close()

    def at_rest(self) -> None:
        world = self.world
        world.settle()
        self.budgets_hold()
        self.one_entry_an_attempt()
        fold = world.fold()
        acted: Counter[str] = Counter()
        for call, _, _, acts in world.log.entries:
            acted[call] += acts
        held = 0
        for (_, call), view in fold.calls.items():
            # 4: a terminal, or in doubt.
            assert view.terminal or view.state == "in_doubt", (call, view.state)
            if view.state == "failed":  # 5
                assert view.request.effect == "read" or not acted[call], (call, view)
            if view.state == "completed":  # 6
                assert acted[call], (call, view)
            held += sum(
                r.amount for a in view.attempts if a.held for r in a.intent.reservations if r.unit == "calls"
            )
        account = fold.accounts.get(("t", "calls"), {}).get("")
        if account is not None:  # 8
            assert (account.held, account.in_doubt) == (held, held)
        for message, answer in world.answers:
            view = fold.calls.get(("t", answer.call_id))
            if answer.state in ("completed", "failed", "in_doubt"):  # 14
                assert view is not None
            if answer.state == "refused" and view is None:  # 12
                assert not [e for e in world.log.entries if e[0] == answer.call_id]
            if answer.state == "conflict":  # 11
                assert view is not None
            assert message.key is not None
        # 9, once more over everything; 15: asking for everything again changes nothing and calls nobody.
        assert fold.differences() == []
        entries, records = len(world.log.entries), len(world.ledger.log)
        for message, answer in list(world.answers):
            if answer.state == "completed":
                world.waiting.append(message)
        world.settle()
        assert (len(world.log.entries), len(world.ledger.log)) == (entries, records)


GovernedCalls.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.usefixtures("_no_waiting")
class TestGovernedCalls(GovernedCalls.TestCase):
    """Run by pytest."""


def test_kinds_are_told_apart() -> None:
    """The model's own words: a head and a list are no records of calls."""
    assert not issubclass(BudgetHead, Completed | Failed | AttemptFailed | Roster)
