"""The invariants of governed calls over thousands of histories: any await may be the last of a gateway."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contracts.account import Fold
from headrace.contracts.ledger import AttemptFailed, BudgetHead, Completed, Failed, Intent, Roster
from headrace.gateway import book
from headrace.gateway.keys import call_id, fingerprint
from tests.property.ledger_world import EFFECTS, MODES, World

EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "150"))
NON_IDEMPOTENT = ("cost_bearing", "money", "destructive")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "backoff_s", lambda *_, **__: 0.0)


class GovernedCalls(RuleBasedStateMachine):
    """Asks, deliveries, deaths, lost answers, resolvers, operators and a callee in every mood, in any order.

    Each invariant is named by its number where it is held. 10 needs the data plane, 16 a clock, 17 spans: they have
    tests of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.so_far = Fold()

    @initialize(
        seed=st.integers(0, 2**32),
        limit=st.sampled_from([3, 10_000]),
        tokens=st.sampled_from([200, 10**9]),
        gateways=st.integers(1, 3),
    )
    def begin(self, seed: int, limit: int, tokens: int, gateways: int) -> None:
        self.limits = {"calls": limit, "tokens": tokens, "micro": 10**9}
        self.world = World(seed, limit=limit, tokens=tokens, gateways=gateways)

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
        """And recover; the next crash may come in the middle of that (15)."""
        self.world.crash(self.world.names[which % len(self.world.names)])

    @rule(which=st.integers(0, 2))
    def sweep(self, which: int) -> None:
        self.world.gateways[self.world.names[which % len(self.world.names)]].sweep()

    @rule(which=st.integers(0, 2))
    def operator(self, which: int) -> None:
        """Says what the callee's log says, once no attempt can be under way any more."""
        world = self.world
        gateway = world.gateways[world.names[which % len(world.names)]]
        for (_, call), view in world.fold().calls.items():
            if view.last.state == "in_doubt" and world.now_us > view.last.intent.lease_until_us:
                gateway.decide(call, applied=world.acted(call) > 0)

    @rule(mode=st.sampled_from(MODES))
    def mood(self, mode: str) -> None:
        self.world.mode = mode

    @rule(seconds=st.sampled_from([1, 30, 100]))
    def tick(self, seconds: int) -> None:
        self.world.now_us += seconds * 1_000_000

    @rule(kind=st.sampled_from(["", "ack lost", "away"]))
    def trouble(self, kind: str) -> None:
        rng = self.world.rng
        self.world.ledger.trouble = lambda: kind if kind and rng.random() < 0.3 else ""

    # --- at every moment ---------------------------------------------------------------------------
    @invariant()
    def budgets_hold(self) -> None:
        """7 at every record, 9 at the end of every batch. (1 is held by the callee, at each attempt it hears.)"""
        if not hasattr(self, "world"):
            return
        ledger = self.world.ledger
        while self.checked < len(ledger.log):
            self.so_far.take(ledger.log[self.checked])
            self.checked += 1
            for (_, name), periods in self.so_far.accounts.items():
                for account in periods.values():
                    assert account.posted + account.held <= self.limits[name] + account.overrun
                    assert 0 <= account.in_doubt <= account.held
            if self.checked in ledger.batches:
                assert self.so_far.differences() == []

    @invariant()
    def one_entry_an_attempt(self) -> None:
        """2 and 3: the callee hears of an attempt once, and acts once on a call that must not be repeated."""
        if not hasattr(self, "world"):
            return
        heard = Counter((call, attempt) for call, attempt, _, _ in self.world.log.entries)
        assert all(n == 1 for n in heard.values()), heard
        for (_, call), view in self.so_far.calls.items():
            if view.request.effect in NON_IDEMPOTENT:
                assert self.world.acted(call) <= 1, (call, self.world.log.entries)

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
        self.ends(fold)
        self.money(fold)
        self.answers(fold)
        self.fenced(fold)
        # 15: everything is started anew, asked about and asked for again: nothing changes, nobody is called.
        entries, records = len(world.log.entries), len(world.ledger.log)
        for name in world.names:
            world.crash(name)
        world.waiting += [m for m, answer in world.answers if answer.state == "completed"]
        world.settle()
        assert (len(world.log.entries), len(world.ledger.log)) == (entries, records)
        assert fold.differences() == []

    def ends(self, fold: Fold) -> None:
        """4, 5 and 6: one end or in doubt; what failed was not done; what completed was, with this answer."""
        for (_, call), view in fold.calls.items():
            acted = self.world.acted(call)
            assert view.terminal or view.state == "in_doubt", (call, view.state)
            assert sum(isinstance(a.end, Completed) for a in view.attempts) <= 1
            if view.state == "failed":
                assert view.request.effect == "read" or not acted, (call, view)
            if view.state == "completed":
                assert acted, (call, view)
                end = view.last.end
                assert isinstance(end, Completed)
                assert (end.outcome.body or {}).get("answer", call) == call
            # 11: whatever the state was, nobody but the first body was ever asked for.
            assert len(self.world.log.bodies.get(call, set())) <= 1, call

    def money(self, fold: Fold) -> None:
        """8: what is held is what is in doubt, in each unit."""
        for (_, name), head in fold.heads.items():
            held = sum(
                r.amount
                for view in fold.calls.values()
                for a in view.attempts
                if a.held
                for r in a.intent.reservations
                if r.budget == name
            )
            for account in head.periods.values():
                assert (account.held, account.in_doubt) == (held, held)

    def answers(self, fold: Fold) -> None:
        """11, 12 and 14: what askers were told stands on record; a refused call has none and was not heard."""
        for message, answer in self.world.answers:
            view = fold.calls.get(("t", answer.call_id))
            print_ = fingerprint(message.callee, "", message.body)
            if answer.state in ("completed", "failed", "in_doubt"):
                assert view is not None
                assert view.request.fingerprint == print_
            if answer.state == "conflict":
                assert view is not None
                assert view.request.fingerprint != print_
            if answer.state == "refused" and view is None:
                assert answer.call_id not in self.world.log.bodies

    def fenced(self, fold: Fold) -> None:
        """13: what a living owner was told by the callee is the end of its attempt, or in evidence."""
        world = self.world
        for me, call, attempt in world.brought:
            if world.epochs[me.owner] != me.epoch:
                continue  # it died, with what it knew
            end = fold.calls["t", call].attempts[attempt - 1].end
            mine = [r for r in world.ledger.log if not isinstance(r, BudgetHead | Roster | Intent) and r.call == call
                    and r.attempt == attempt and (r.owner, r.epoch) == (me.owner, me.epoch)]  # fmt: skip
            said = [e for e in world.evidence if (e.kind, e.call, e.attempt, e.by)
                    == ("late_outcome", call, attempt, f"{me.owner}@{me.epoch}")]  # fmt: skip
            assert mine or said, (me, call, attempt, end)


GovernedCalls.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.usefixtures("_no_waiting")
class TestGovernedCalls(GovernedCalls.TestCase):
    """Run by pytest."""


STATES = {
    "open": ("late", "cost_bearing"),
    "retrying": ("breaks before", "idempotent"),
    "completed": ("answers", "money"),
    "failed, may be tried again": ("throttles", "money"),
    "failed for good": ("refuses", "money"),
    "in_doubt": ("breaks after", "destructive"),
}


@pytest.mark.parametrize("state", STATES)
def test_another_body_is_refused_in_every_state(state: str) -> None:
    """11: whoever asks, and whatever the call has come to; the callee hears nothing of it."""
    world = World(1, gateways=2)
    world.mode, effect = STATES[state]
    world.ask(effect, "k", 0)  # type: ignore[arg-type]
    world.deliver()
    wanted = state.partition(",")[0].removesuffix(" for good")
    for _ in range(400):
        world.turns(1)
        view = world.fold().calls.get(("t", call_id("t", "a", "k")))
        if view is not None and view.state == wanted:
            break
    else:
        raise AssertionError(f"it never was {wanted}")
    world.answers = []
    world.ask(effect, "k", 1)  # type: ignore[arg-type]
    for _ in range(20):
        world.deliver()
        world.turns(5)
    assert [a.state for m, a in world.answers if b'"1"' in bytes(m.body)] == ["conflict"]
    assert len(world.log.bodies.get(call_id("t", "a", "k"), {b""})) == 1
    for gateway in world.gateways.values():
        gateway.die()
    world.turns(2)
    world.loop.close()


def test_kinds_are_told_apart() -> None:
    """The model's own words: a head and a list are no records of calls."""
    assert not issubclass(BudgetHead, Completed | Failed | AttemptFailed | Roster)
