"""What follows from what was seen of an attempt: GATEWAY's first table, and what an exhausted retry turns into.

Pure: effect and observation in, verdict out. An observation says how far the request got, since that decides whether
the callee may have acted: nothing was written; a whole answer came; or something broke in between.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from headrace.contracts.ledger import Effect


class Seen(Enum):
    """How an attempt went, as far as the gateway saw."""

    ANSWERED = "a whole answer of success"
    NOT_SENT = "name, connection or TLS failed: nothing was written"
    REFUSED = "a whole answer 4xx: the callee did not do it"
    THROTTLED = "a whole answer 429"
    SERVER_ERROR = "a whole answer 5xx"
    BROKEN = "reset or time-out after the first byte was written"
    CUT = "the answer's stream broke after some of it"
    OVERLONG = "an answer of success with more bytes than are read"
    DIED = "the gateway died while the attempt was open"


class Verdict(Enum):
    """What is written of an attempt."""

    COMPLETED = "completed"
    PARTIAL = "completed, partial: input and counted output are posted, the usage is estimated"
    FAILED = "failed for good: the same key gets the same refusal"
    RETRYABLE = "failed, nothing was done: it may be tried again"
    AGAIN = "attempt failed: a further one follows (with the same remote key)"
    UNVERIFIED = "attempt failed, charged as 0 without the callee's word"
    IN_DOUBT = "in doubt"


V = Verdict
_EVERY: Final[dict[Seen, Verdict]] = {
    Seen.ANSWERED: V.COMPLETED,
    Seen.NOT_SENT: V.RETRYABLE,
    Seen.REFUSED: V.FAILED,
    Seen.THROTTLED: V.RETRYABLE,
}
_BY_EFFECT: Final[dict[Seen, dict[Effect, Verdict]]] = {
    Seen.SERVER_ERROR: {
        "read": V.AGAIN, "idempotent": V.AGAIN, "cost_bearing": V.UNVERIFIED,
        "money": V.IN_DOUBT, "destructive": V.IN_DOUBT,
    },
    Seen.BROKEN: {
        "read": V.AGAIN, "idempotent": V.AGAIN, "cost_bearing": V.IN_DOUBT,
        "money": V.IN_DOUBT, "destructive": V.IN_DOUBT,
    },
    Seen.CUT: {
        "read": V.AGAIN, "idempotent": V.AGAIN, "cost_bearing": V.PARTIAL,
        "money": V.IN_DOUBT, "destructive": V.IN_DOUBT,
    },
    # It was done, and asking again would bring as much.
    Seen.OVERLONG: {
        "read": V.FAILED, "idempotent": V.PARTIAL, "cost_bearing": V.PARTIAL,
        "money": V.IN_DOUBT, "destructive": V.IN_DOUBT,
    },
    Seen.DIED: {
        "read": V.AGAIN, "idempotent": V.AGAIN, "cost_bearing": V.IN_DOUBT,
        "money": V.IN_DOUBT, "destructive": V.IN_DOUBT,
    },
}  # fmt: skip


_UNKNOWN: Final = (Seen.SERVER_ERROR, Seen.BROKEN, Seen.CUT, Seen.OVERLONG, Seen.DIED)


def verdict(effect: Effect, seen: Seen) -> Verdict:
    """What is written of an attempt of a call with this effect."""
    return _EVERY.get(seen) or _BY_EFFECT[seen][effect]


def may_have_applied(effect: Effect, seen: Seen) -> bool:
    """Whether the callee may have acted. A read acts on nothing, however often."""
    return effect != "read" and seen in _UNKNOWN


def last_verdict(effect: Effect, seen: Seen, *, unknown_before: bool) -> Verdict:
    """`verdict` where no further attempt is allowed. `unknown_before`: an earlier attempt may have applied it.

    Then not even a definite refusal of this attempt means that nothing happened.
    """
    found = verdict(effect, seen)
    if found in (V.COMPLETED, V.PARTIAL, V.IN_DOUBT):
        return found
    if unknown_before:
        return V.IN_DOUBT
    if found is V.AGAIN:
        return V.IN_DOUBT if may_have_applied(effect, seen) else V.RETRYABLE
    return V.RETRYABLE if found is V.UNVERIFIED else found
