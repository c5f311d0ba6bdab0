"""The records of the ledger: what a gateway writes of each governed call, and of the budgets that pay for it.

A call's records stand on one subject, `hr.ledger.call.<tenant>.<call>`, in the order in which they were accepted:
each was written with the expected last sequence of its subject, so nobody writes between them unseen. A budget's head
stands on `hr.ledger.budget.<tenant>.<budget>` and is written in one atomic batch with the records that move it. Money
is an integer of micro-units; tokens and calls are counted as they are. `contracts.account` says what records mean
together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.contracts.messages import Blob
from headrace.contracts.names import Count, Micros, ShortText, Token

Effect = Literal["read", "idempotent", "cost_bearing", "money", "destructive"]
"""What a call does to the world, from harmless to what must never happen twice."""

EFFECTS: tuple[Effect, ...] = ("read", "idempotent", "cost_bearing", "money", "destructive")
DANGEROUS: tuple[Effect, ...] = ("money", "destructive")
"""Effects for which a key is required and a terminal record is awaited before the answer."""

Unit = Literal["calls", "tokens", "micro"]
Period = Literal["day", "month", "none"]
Epoch = Annotated[int, Meta(ge=0, lt=2**53)]
AttemptNumber = Annotated[int, Meta(ge=1, le=1_000)]
PeriodName = Annotated[str, Meta(pattern=r"^(\d{4}-\d{2}(-\d{2})?)?$(?!\n)")]
"""`2026-11-30` of a day, `2026-11` of a month (UTC), empty for a budget without period."""

CallId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
"""sha256 in hexadecimal."""


class Reservation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt may cost one budget at most, held from its intent on."""

    budget: Token
    unit: Unit
    amount: Count
    period: PeriodName = ""


class Posting(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt did cost one budget: `reserved` is released, `amount` is posted, in the intent's period."""

    budget: Token
    unit: Unit
    reserved: Count
    amount: Count
    period: PeriodName = ""


class CallRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked. `fingerprint` covers callee, operation and body; volatile headers are left out of it."""

    callee: Token
    effect: Effect
    principal: Token
    fingerprint: Digest
    operation: Annotated[str, Meta(max_length=256)] = ""
    key_hash: Digest | None = None
    """Hash of the caller's key; None: the call is not dedupable."""
    model: Annotated[str, Meta(max_length=512)] | None = None
    max_output_tokens: Count | None = None
    body: Blob | None = None
    message_id: Annotated[str, Meta(max_length=256)] | None = None
    step: Annotated[str, Meta(max_length=256)] | None = None
    parent: CallId | None = None
    conversation: Annotated[str, Meta(max_length=256)] | None = None
    task: Annotated[str, Meta(max_length=256)] | None = None
    """What the call is for, as spending is grouped."""
    deadline_us: Micros | None = None
    traceparent: Annotated[str, Meta(max_length=64)] | None = None


class CallUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a call, and who says so: the callee, our own count, an estimate, or the worst case."""

    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0
    source: Literal["provider", "counted", "estimated", "assumed"] = "provider"


class CallOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the callee answered: inline up to a bound, else as an object. `digest` is of the bytes that came."""

    status: Annotated[int, Meta(ge=0, le=999)] = 0
    body: Any = None
    blob: Blob | None = None
    digest: Digest | None = None
    finish_reason: Annotated[str, Meta(max_length=64)] | None = None
    partial: bool = False
    redacted: bool = False
    """Something in the body was replaced when it was captured; `digest` is of what the callee sent."""
    omitted: Annotated[str, Meta(max_length=64)] | None = None
    """Why there is neither a body nor an object of it, though the callee sent one."""
    chunks: Count = 0
    provider_request_id: Annotated[str, Meta(max_length=256)] | None = None
    response_id: Annotated[str, Meta(max_length=256)] | None = None


class CallError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: `type` is stable, `status` is the callee's HTTP status where there was one."""

    type: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}$(?!\n)")]
    message: ShortText = ""
    status: Annotated[int, Meta(ge=0, le=999)] | None = None


class CallTimes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When an attempt passed each stage, in microseconds since the epoch; 0 where unknown."""

    sent_us: Micros = 0
    first_byte_us: Micros = 0
    done_us: Micros = 0


# --- records of a call ------------------------------------------------------------------------------


class _Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every record of a call has. `owner` and `epoch` name the gateway that wrote it, and its life.

    The version of its form is in the schema header of its message.
    """

    call: CallId
    tenant: Token
    attempt: AttemptNumber
    owner: Token
    epoch: Epoch
    at_us: Micros


class Intent(_Record, frozen=True, kw_only=True, omit_defaults=True, tag="intent"):
    """The call is about to be dialed. Without a terminal record after it: it may have been sent.

    `lease_until_us` is when its owner has given it up by itself at the latest: nobody else decides before.
    """

    request: CallRequest
    lease_until_us: Micros
    reservations: list[Reservation] = []
    asked_by: Token | None = None
    """The asking that this attempt serves: its message stays until the call has an end."""
    remote_key: Annotated[str, Meta(max_length=256)] | None = None
    """Idempotency key that the callee is given, constant over the attempts of a call."""
    price_version: Annotated[str, Meta(max_length=64)] | None = None
    max_cost_micro: Count = 0
    """What the attempt may cost at most, whether a budget counts it or not."""


class Completed(_Record, frozen=True, kw_only=True, omit_defaults=True, tag="completed"):
    """Terminal: the callee applied it and answered (or its answer was found later: `resolved_by`)."""

    outcome: CallOutcome
    usage: CallUsage = CallUsage()
    cost_micro: Count = 0
    postings: list[Posting] = []
    resolved_by: Annotated[str, Meta(max_length=256)] | None = None
    why: ShortText = ""
    times: CallTimes = CallTimes()


class Failed(_Record, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """Terminal unless `retryable`: it did not happen, and it cost nothing."""

    error: CallError
    retryable: bool = False
    """The same key may run it again as a further attempt."""
    retry_after_us: Micros | None = None
    request_sent: bool = False
    cost_micro: Count = 0
    """Not 0 only where an operator says so: it was not done, and was charged all the same."""
    postings: list[Posting] = []
    resolved_by: Annotated[str, Meta(max_length=256)] | None = None
    why: ShortText = ""
    times: CallTimes = CallTimes()


class AttemptFailed(_Record, frozen=True, kw_only=True, omit_defaults=True, tag="attempt_failed"):
    """This attempt is over and another one follows.

    `charge_unverified`: the callee may have charged what is posted as 0.
    """

    error: CallError
    request_sent: bool = False
    may_have_applied: bool = False
    charge_unverified: bool = False
    retry_after_us: Micros | None = None
    postings: list[Posting] = []
    times: CallTimes = CallTimes()


class InDoubt(_Record, frozen=True, kw_only=True, omit_defaults=True, tag="in_doubt"):
    """It may have happened. What was reserved stays held until a resolver, an operator or late evidence says more."""

    error: CallError
    request_sent: bool = True
    times: CallTimes = CallTimes()


CallRecord = Intent | Completed | Failed | AttemptFailed | InDoubt


# --- budgets ----------------------------------------------------------------------------------------


class PeriodAccount(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One period of a budget. `held` includes `in_doubt`; `overrun` was posted beyond what had been reserved."""

    posted: Count = 0
    held: Count = 0
    in_doubt: Count = 0
    overrun: Count = 0


class BudgetHead(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A budget as it stands: its limit, and its periods (past ones for as long as something is held in them).

    `agent` bounds it to one principal; without one it is the whole tenant's.
    """

    tenant: Token
    budget: Token
    unit: Unit
    limit: Count
    period: Period = "none"
    agent: Token | None = None
    periods: dict[str, PeriodAccount] = {}
    at_us: Micros = 0


class BudgetName(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a call has to know of a budget before it reads its head: whom it bounds, and in what."""

    budget: Token
    unit: Unit
    period: Period = "none"
    agent: Token | None = None


class Roster(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The budgets of a tenant, on `hr.ledger.roster.<tenant>`: written in one batch with each new head.

    It is read for each intent, so that a budget binds from the moment in which it is stored.
    """

    tenant: Token
    budgets: list[BudgetName] = []
    at_us: Micros = 0


# --- beside the ledger ------------------------------------------------------------------------------


class Evidence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something learned of a call that is no state of it, on `hr.evidence.<tenant>.<call>`.

    `late_outcome` of a fenced owner, `resolver` answers, `operator` notes, `headers` (ids as soon as they are seen),
    `rejected` decisions, and an approval that was `approval_asked`, `approved` or `denied`.
    """

    call: CallId
    tenant: Token
    kind: Literal[
        "late_outcome", "resolver", "operator", "headers", "rejected", "approval_asked", "approved", "denied"
    ]
    attempt: Annotated[int, Meta(ge=0, le=1_000)] = 0
    by: Annotated[str, Meta(max_length=256)] = ""
    why: ShortText = ""
    outcome: CallOutcome | None = None
    error: CallError | None = None
    usage: CallUsage | None = None
    request: CallRequest | None = None
    body: Any = None
    """What waits for approval, as a person sees it: redacted, and only up to a bound (else `request.body`)."""
    at_us: Micros = 0
