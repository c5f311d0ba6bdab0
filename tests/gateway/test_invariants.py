"""The checker of the invariants finds what is wrong: for each of them a world in which it alone does not hold."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.contracts.account import AttemptView, settle
from headrace.contracts.calls import CallAnswer
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    CallError,
    CallOutcome,
    Completed,
    Evidence,
    Failed,
    InDoubt,
    PeriodAccount,
)
from tests.gateway.invariants import INVARIANTS, Again, Restart, Stored, Told, Witness, check, violations
from tests.gateway.test_book import intent, one

FIRST = intent("c", one())
SECOND = replace(FIRST, attempt=2)
COMMON: dict[str, Any] = {"call": "c", "tenant": "t", "attempt": 1, "owner": "g1", "epoch": 1, "at_us": 2}
DONE = Completed(
    **COMMON,
    outcome=CallOutcome(status=200, body={"text": "of body-c"}, digest="d" * 64),
    postings=settle(AttemptView(FIRST), {"calls": 1}),
)
NOT_DONE = Failed(**COMMON, error=CallError(type="refused"), postings=settle(AttemptView(FIRST)))
AGAIN = AttemptFailed(**COMMON, error=CallError(type="reset"), postings=settle(AttemptView(FIRST)))
DOUBTFUL = InDoubt(**COMMON, error=CallError(type="reset"))


def head(limit: int = 10, **account: int) -> BudgetHead:
    periods = {"": PeriodAccount(**account)} if account else {}
    return BudgetHead(tenant="t", budget="b", unit="calls", limit=limit, periods=periods)


def entry(at: float = 3.5, **more: Any) -> dict[str, Any]:
    common = {"call": "c", "id": "body-c", "applied": True, "digest": "q", "answer": "d" * 64, "trace": ""}
    return {"at": at, **common, **more}


def witness(*records: Any, entries: list[dict[str, Any]] | None = None, **more: Any) -> Witness:
    """Record n is stored at second n."""
    ledger = [Stored(n, float(n), record) for n, record in enumerate(records, 1)]
    return Witness(ledger=ledger, entries=entries or [], names={"c": "c"}, **more)


GOOD = (head(), FIRST, head(held=1), DONE, head(posted=1))
OPEN = (head(), FIRST, head(held=1))
FAILED = (head(), FIRST, head(held=1), NOT_DONE, head(posted=0))
TWICE = (*OPEN, AGAIN, head(held=0), SECOND, head(held=1))
LATE = Evidence(call="c", tenant="t", kind="late_outcome", attempt=1, by="g1@1")
TOLD = CallAnswer(call_id="c", state="completed")
TRACES = [entry(trace=f"00-{n * 32}-{n * 16}-01") for n in "12"]

WRONG: dict[str, tuple[int, Witness]] = {
    "heard before its intent": (1, witness(*GOOD, entries=[entry(1.5)])),
    "heard without an intent": (1, witness(*GOOD, entries=[entry(), entry(4.0)])),
    "one attempt heard twice": (2, witness(*GOOD, entries=[entry(), entry(4.0)])),
    "done twice": (3, witness(*TWICE, entries=[entry(), entry(8.0)])),
    "made again in doubt": (3, witness(*OPEN, DOUBTFUL, head(held=1, in_doubt=1), SECOND, head(held=2, in_doubt=1))),
    "open at rest": (4, witness(*OPEN)),
    "failed and done": (5, witness(*FAILED, entries=[entry()])),
    "completed and not done": (6, witness(*GOOD, entries=[entry(applied=False)])),
    "completed by another answer": (6, witness(*GOOD, entries=[entry(answer="e" * 64)])),
    "completed by the answer to another": (6, witness(*GOOD, entries=[entry(id="body-x")])),
    "attempts that ask for different things": (6, witness(*GOOD, entries=[entry(), entry(digest="r")])),
    "over the limit": (7, witness(head(0), *GOOD[1:])),
    "held and not in doubt": (8, witness(*OPEN, DONE, head(held=1))),
    "open and held": (8, witness(*OPEN)),
    "a head that its records do not make": (9, witness(*OPEN, DONE, head(posted=2))),
    "a head that was wrong for a while": (9, witness(head(), FIRST, head(held=2), DONE, head(posted=1))),
    "another projection": (10, witness(*GOOD, rebuilt=[True, False])),
    "another body not refused": (11, witness(*GOOD, again=[Again("c", True, "completed", TOLD, 1, 1)])),
    "asked again and heard": (11, witness(*GOOD, again=[Again("c", False, "completed", TOLD, 1, 2)])),
    "not replayed": (11, witness(*GOOD, again=[Again("c", False, "completed", TOLD, 1, 1)])),
    "refused and heard": (12, witness(entries=[entry()], rejected=["c"])),
    "refused and with an intent": (12, witness(*OPEN, rejected=["c"])),
    "heard and asked by nobody": (12, witness(*GOOD, entries=[entry(call="x")])),
    "evidence of an end that there is not": (13, witness(*OPEN, evidence=[LATE])),
    "told before it was stored": (14, witness(*GOOD, told=[Told(3.9, TOLD)])),
    "told something else": (14, witness(*FAILED, told=[Told(9.0, TOLD)])),
    "accepted and gone": (14, witness(told=[Told(9.0, replace(TOLD, state="in_progress"))])),
    "a restart that wrote": (15, witness(*GOOD, restarts=[Restart(5, 6, 1, 1)])),
    "a restart that called": (15, witness(*GOOD, restarts=[Restart(5, 5, 1, 2)])),
    "another usage": (17, witness(*GOOD, entries=[entry(usage=[1, 1])])),
    "two traces": (17, witness(*TWICE, entries=TRACES)),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    number, found = WRONG[what]
    with pytest.raises(AssertionError, match=f"^{number}: "):
        INVARIANTS[number](found)
    assert any(sentence.startswith(f"{number}: ") for sentence in violations(found)[1])


def test_each_invariant_has_a_world_without_it() -> None:
    assert {number for number, _ in WRONG.values()} == set(INVARIANTS) == set(range(1, 18)) - {16}


def test_a_whole_world_is_found_whole() -> None:
    counts = check(
        witness(
            *GOOD,
            entries=[entry(trace="00-" + "1" * 32 + "-" + "2" * 16 + "-01")],
            told=[Told(4.5, TOLD)],
            again=[
                Again("c", False, "completed", replace(TOLD, replayed=True), 1, 1),
                Again("c", True, "completed", replace(TOLD, state="conflict"), 1, 1),
            ],
            restarts=[Restart(5, 5, 1, 1)],
            rejected=["r"],
            rebuilt=[True],
        )
    )
    assert {number for number, n in counts.items() if not n} == {5, 13}
