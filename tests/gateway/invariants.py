"""The invariants of governed calls, as far as processes can be seen from outside: each one a function.

M is the callee's own log, L the ledger's records in their order with the time at which the broker stored each, B the
heads of budgets, A what askers were told. A function returns how many things it looked at; what does not hold is an
AssertionError that names it. `check` runs all of them at rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headrace.contracts.account import CallView, Fold
from headrace.contracts.calls import CallAnswer
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    Completed,
    Evidence,
    Failed,
    InDoubt,
    Intent,
    Roster,
)

KEYED = ("idempotent", "money", "destructive")
ONCE = ("cost_bearing", "money", "destructive")
"""Effects of which no repeat is allowed."""
ENDS = (Completed, Failed, AttemptFailed, InDoubt)


class Stored(NamedTuple):
    """A record of the ledger; `at` is when the broker stored it, in seconds since the epoch."""

    seq: int
    at: float
    record: Any


class Told(NamedTuple):
    """What an asker was told, and when."""

    at: float
    answer: CallAnswer


class Again(NamedTuple):
    """A call that was asked again at rest: with another body, or with the same."""

    call: str
    other_body: bool
    state: str
    answer: CallAnswer
    heard_before: int
    heard_after: int


class Restart(NamedTuple):
    """Lengths of L and M before and after gateways were killed at rest and started again."""

    records: int
    records_after: int
    heard: int
    heard_after: int


class Witness:
    """All that was seen of one world, at rest. `names` gives each call's name in M: its key there, or its body's id."""

    def __init__(
        self,
        *,
        ledger: list[Stored],
        entries: list[dict[str, Any]],
        names: dict[str, str],
        evidence: Iterable[Evidence] = (),
        told: Iterable[Told] = (),
        again: Iterable[Again] = (),
        restarts: Iterable[Restart] = (),
        rejected: Iterable[str] = (),
        rebuilt: Iterable[bool] = (),
    ) -> None:
        self.ledger = ledger
        self.entries = entries
        self.evidence = list(evidence)
        self.told, self.again, self.restarts = list(told), list(again), list(restarts)
        self.rejected, self.rebuilt = list(rejected), list(rebuilt)
        self.fold = Fold()
        for stored in ledger:
            self.fold.take(stored.record)
        calls = {name: call for call, name in names.items()}
        self.heard: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in entries:
            self.heard[calls.get(entry["call"], f"? {entry['call']}")].append(entry)
        self.intents: dict[str, list[Stored]] = defaultdict(list)
        self.ends: dict[str, list[Stored]] = defaultdict(list)
        for stored in ledger:
            if isinstance(stored.record, Intent):
                self.intents[stored.record.call].append(stored)
            elif isinstance(stored.record, ENDS):
                self.ends[stored.record.call].append(stored)

    def views(self) -> Iterable[tuple[str, CallView]]:
        for (_, call), view in self.fold.calls.items():
            yield call, view

    def acted(self, call: str) -> int:
        """How often the callee acted on a call."""
        return sum(e["applied"] for e in self.heard.get(call, []))


# --- the invariants ---------------------------------------------------------------------------------


def intent_before_call(w: Witness) -> int:
    """1: every entry in M has an earlier durable intent in L."""
    for call, entries in w.heard.items():
        stored = sorted(s.at for s in w.intents.get(call, []))
        for n, entry in enumerate(sorted(entries, key=lambda e: e["at"])):
            assert n < len(stored), f"1: {call} was heard {n + 1} times, with {len(stored)} intents"
            assert stored[n] < entry["at"], f"1: {call} was heard before its intent was stored"
    return len(w.entries)


def one_entry_an_attempt(w: Witness) -> int:
    """2: of each attempt, M has one entry at most."""
    for call, view in w.views():
        heard = len(w.heard.get(call, []))
        assert heard <= len(view.attempts), (
            f"2: {call} has {len(view.attempts)} attempts and was heard {heard} times"
        )
    return len(w.fold.calls)


def never_twice(w: Witness) -> int:
    """3: a call that must not be repeated is done once at most, and made again only after a definite "not done"."""
    checked = 0
    for call, view in w.views():
        if view.request.effect not in ONCE:
            continue
        checked += 1
        assert w.acted(call) <= 1, f"3: {call} ({view.request.effect}) was done {w.acted(call)} times"
        for attempt in view.attempts[:-1]:
            assert isinstance(attempt.end, Failed | AttemptFailed), (
                f"3: {call} was tried again after {attempt.state}"
            )
            assert not getattr(attempt.end, "may_have_applied", False), f"3: {call} was tried again in doubt"
    return checked


def one_end(w: Witness) -> int:
    """4: at rest each call has exactly one terminal, or is in doubt."""
    for call, view in w.views():
        assert view.state in ("completed", "failed", "in_doubt"), f"4: {call} is {view.state} at rest"
        final = [
            s.record for s in w.ends[call]
            if isinstance(s.record, Completed) or (isinstance(s.record, Failed) and not s.record.retryable)
        ]  # fmt: skip
        assert len(final) <= 1, f"4: {call} has {len(final)} terminals"
        attempts = Counter(s.record.attempt for s in w.ends[call] if not isinstance(s.record, InDoubt))
        assert all(n == 1 for n in attempts.values()), f"4: an attempt of {call} ended twice"
    return len(w.fold.calls)


def failed_was_not_done(w: Witness) -> int:
    """5: what L calls failed, the callee did not do. A read does nothing, however often."""
    failed = [(c, v) for c, v in w.views() if v.state == "failed" and v.request.effect != "read"]
    for call, _ in failed:
        assert not w.acted(call), f"5: {call} is failed, and the callee did it"
    return len(failed)


def completed_was_done(w: Witness) -> int:
    """6: what L calls completed, the callee did, with this answer; and every attempt asked for the same."""
    completed = [(c, v) for c, v in w.views() if v.state == "completed"]
    for call, view in completed:
        entries = w.heard.get(call, [])
        assert w.acted(call), f"6: {call} is completed, and the callee did nothing"
        assert len({e["digest"] for e in entries}) == 1, (
            f"6: the attempts of {call} asked for different things"
        )
        outcome = view.last.end.outcome  # type: ignore[union-attr]
        assert str(outcome.body).count(entries[0]["id"]) or outcome.partial, (
            f"6: {call} has the answer of another call"
        )
        if not outcome.chunks:
            assert outcome.digest == entries[0]["answer"], (
                f"6: {call} has another answer than the callee gave"
            )
    return len(completed)


def budgets_hold(w: Witness) -> int:
    """7: at every prefix of L: posted + held ≤ limit + overrun, and held ≥ 0."""
    fold = Fold()
    checked = 0
    for stored in w.ledger:
        fold.take(stored.record)  # raises where more would be released than is held
        for key, periods in fold.accounts.items():
            for account in periods.values():
                limit = fold.heads[key].limit
                assert account.posted + account.held <= limit + account.overrun, (
                    f"7: budget {key} at {stored.seq}"
                )
                assert 0 <= account.in_doubt <= account.held, f"7: budget {key} at {stored.seq}"
                checked += 1
    return checked


def held_is_in_doubt(w: Witness) -> int:
    """8: at rest each budget holds what calls in doubt hold, and nothing else."""
    held: Counter[tuple[str, str]] = Counter()
    for (tenant, _), view in w.fold.calls.items():
        for attempt in view.attempts:
            if attempt.held:
                assert attempt.state == "in_doubt", f"8: {view.call} holds money and is {attempt.state}"
                for r in attempt.intent.reservations:
                    held[tenant, r.budget] += r.amount
    for key, head in w.fold.heads.items():
        there = sum(account.held for account in head.periods.values())
        doubt = sum(account.in_doubt for account in head.periods.values())
        assert (there, doubt) == (held[key], held[key]), (
            f"8: budget {key} holds {there}, {held[key]} are in doubt"
        )
    return len(w.fold.heads)


def heads_are_the_fold(w: Witness) -> int:
    """9: at the end of every batch the heads are what the records say."""
    fold = Fold()
    checked = 0
    for n, stored in enumerate(w.ledger):
        fold.take(stored.record)
        following = w.ledger[n + 1].record if n + 1 < len(w.ledger) else None
        # A batch ends with its heads: one that is followed by a head may be in the middle.
        if isinstance(stored.record, BudgetHead | Roster) and not isinstance(following, BudgetHead | Roster):
            assert fold.differences() == [], f"9: at {stored.seq}: {fold.differences()}"
            checked += 1
    assert fold.differences() == [], f"9: {fold.differences()}"
    return checked + 1


def projection_is_the_ledger(w: Witness) -> int:
    """10: the data plane's tables, dropped and made again from L, are identical."""
    assert all(w.rebuilt), "10: the rebuilt tables are other ones"
    return len(w.rebuilt)


def keys_hold(w: Witness) -> int:
    """11: a key with another body is refused in every state; with the same body it adds nothing to M."""
    for again in w.again:
        assert again.heard_before == again.heard_after, f"11: asking for {again.call} again was heard"
        wanted = "conflict" if again.other_body else again.state
        assert again.answer.state == wanted, (
            f"11: {again.call}, {again.state}: {again.answer.state} to {again}"
        )
        assert again.other_body or again.answer.replayed, f"11: {again.call} was not replayed"
    return len(w.again)


def refused_costs_nothing(w: Witness) -> int:
    """12: a rejected request has no entry in M, and no record, hence no money."""
    for call in w.rejected:
        assert not w.heard.get(call), f"12: {call} was refused and heard"
        assert call not in w.intents, f"12: {call} was refused and has an intent"
    assert not [call for call in w.heard if call.startswith("? ")], (
        "12: the callee heard of calls that nobody made"
    )
    return len(w.rejected)


def fenced_is_evidence(w: Witness) -> int:
    """13: what a fenced owner brought later is evidence, and the end of its attempt is another writer's.

    An owner that was stopped between its write and the broker's answer may find its own end overtaken by what followed:
    then it was not fenced, and has said the same twice.
    """
    checked = 0
    for evidence in w.evidence:
        if evidence.kind != "late_outcome":
            continue
        view = w.fold.calls[evidence.tenant, evidence.call]
        end = view.attempts[evidence.attempt - 1].end
        assert end is not None, f"13: {evidence.call} has no end, and evidence of one"
        stored = [s.record for s in w.ends[evidence.call] if s.record.attempt == evidence.attempt]
        # What is resolved from evidence may be written by whoever brought it: it was fenced all the same.
        own = [r for r in stored if not getattr(r, "resolved_by", None)]
        if not any(f"{r.owner}@{r.epoch}" == evidence.by for r in own):
            assert stored, f"13: {evidence.call} was taken over by nobody"
            checked += 1
    return checked


def durable_before_told(w: Witness) -> int:
    """14: nobody is told of an accept or an end before its record is stored."""
    for at, answer in w.told:
        call = answer.call_id
        if answer.state == "in_progress":
            assert call in w.intents or call in w.rejected, (
                f"14: {call} was accepted, and the ledger has nothing of it"
            )
        elif answer.state in ("completed", "failed", "in_doubt"):
            stored = [s for s in w.ends[call] if s.at < at and kind_of(s.record) == answer.state]
            assert stored, f"14: {call} was said to be {answer.state} before that was stored"
    return len(w.told)


def recovery_repeats(w: Witness) -> int:
    """15: gateways killed at rest and started again change nothing and call nobody."""
    for r in w.restarts:
        assert (r.records, r.heard) == (r.records_after, r.heard_after), (
            f"15: a restart at rest changed something: {r}"
        )
    return len(w.restarts)


def one_trace(w: Witness) -> int:
    """17: one trace over all attempts of a call, in M as in L; usage in L is the callee's where it said any."""
    checked = 0
    for call, view in w.views():
        traces = {e["trace"].split("-")[1] for e in w.heard.get(call, []) if e["trace"].count("-") == 3}
        traces |= {t.split("-")[1] for a in view.attempts if (t := a.intent.request.traceparent)}
        assert len(traces) <= 1, f"17: call {call} has the traces {traces}"
        checked += bool(traces)
        end = view.last.end
        if isinstance(end, Completed) and end.usage.source == "provider" and end.resolved_by is None:
            stated = [e.get("usage", [0, 0]) for e in w.heard.get(call, [])]
            assert [end.usage.input_tokens, end.usage.output_tokens] in stated, (
                f"17: {call} posts another usage"
            )
    return checked


def kind_of(record: Any) -> str:
    """The state in which a record leaves its attempt."""
    return {Completed: "completed", Failed: "failed", InDoubt: "in_doubt"}.get(type(record), "")


INVARIANTS: dict[int, Callable[[Witness], int]] = {
    1: intent_before_call,
    2: one_entry_an_attempt,
    3: never_twice,
    4: one_end,
    5: failed_was_not_done,
    6: completed_was_done,
    7: budgets_hold,
    8: held_is_in_doubt,
    9: heads_are_the_fold,
    10: projection_is_the_ledger,
    11: keys_hold,
    12: refused_costs_nothing,
    13: fenced_is_evidence,
    14: durable_before_told,
    15: recovery_repeats,
    17: one_trace,
}
"""16, that what is beside the path costs a call nothing, is a matter of time: benchmarks show it."""


def check(w: Witness) -> dict[int, int]:
    """Hold all invariants; return how many things each looked at."""
    return {number: invariant(w) for number, invariant in INVARIANTS.items()}


def violations(w: Witness) -> tuple[dict[int, int], list[str]]:
    """As `check`, and what does not hold as sentences instead of an error."""
    counts: dict[int, int] = {}
    wrong: list[str] = []
    for number, invariant in INVARIANTS.items():
        try:
            counts[number] = invariant(w)
        except AssertionError as e:
            counts[number] = 0
            wrong.append(str(e).splitlines()[0])
    return counts, wrong
