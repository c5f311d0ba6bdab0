"""GATEWAY's table of observations, row by row, and what an exhausted retry turns into."""

from __future__ import annotations

import pytest

from headrace.contracts.ledger import EFFECTS, Effect
from headrace.gateway.verdicts import Seen, Verdict, last_verdict, may_have_applied, verdict

V = Verdict
TABLE: dict[Seen, tuple[Verdict, Verdict, Verdict, Verdict]] = {
    # observed: read, idempotent, cost-bearing, money and destructive
    Seen.ANSWERED: (V.COMPLETED, V.COMPLETED, V.COMPLETED, V.COMPLETED),
    Seen.NOT_SENT: (V.RETRYABLE, V.RETRYABLE, V.RETRYABLE, V.RETRYABLE),
    Seen.REFUSED: (V.FAILED, V.FAILED, V.FAILED, V.FAILED),
    Seen.THROTTLED: (V.RETRYABLE, V.RETRYABLE, V.RETRYABLE, V.RETRYABLE),
    Seen.SERVER_ERROR: (V.AGAIN, V.AGAIN, V.UNVERIFIED, V.IN_DOUBT),
    Seen.BROKEN: (V.AGAIN, V.AGAIN, V.IN_DOUBT, V.IN_DOUBT),
    Seen.CUT: (V.AGAIN, V.AGAIN, V.PARTIAL, V.IN_DOUBT),
    Seen.OVERLONG: (V.FAILED, V.PARTIAL, V.PARTIAL, V.IN_DOUBT),
    Seen.DIED: (V.AGAIN, V.AGAIN, V.IN_DOUBT, V.IN_DOUBT),
}


@pytest.mark.parametrize("seen", list(Seen))
def test_the_table(seen: Seen) -> None:
    read, idempotent, cost, money = TABLE[seen]
    assert [verdict(effect, seen) for effect in EFFECTS] == [read, idempotent, cost, money, money]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("seen", list(Seen))
@pytest.mark.parametrize("unknown_before", [False, True])
def test_the_last_attempt_never_says_that_nothing_happened_if_it_may_have(
    effect: Effect, seen: Seen, *, unknown_before: bool
) -> None:
    found = last_verdict(effect, seen, unknown_before=unknown_before)
    assert found in (V.COMPLETED, V.PARTIAL, V.FAILED, V.RETRYABLE, V.IN_DOUBT)
    if found in (V.FAILED, V.RETRYABLE):
        assert not unknown_before
        # A model's 5xx is posted as 0, unverified: GATEWAY says so.
        assert not may_have_applied(effect, seen) or (effect, seen) == ("cost_bearing", Seen.SERVER_ERROR)
