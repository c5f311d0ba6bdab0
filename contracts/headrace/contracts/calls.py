"""Governed calls as they are asked and answered: what waits on `hr.calls.<tenant>.<agent>`, and the form of answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from headrace.contracts.ledger import CallId, Period, Unit
from headrace.contracts.names import Micros, Token

Key = Annotated[str, Meta(min_length=1, max_length=256)]
"""A caller's idempotency key, unique within (tenant, agent)."""

AnswerState = Literal[
    "completed", "failed", "refused", "in_doubt", "in_progress", "conflict", "awaiting_approval"
]


class CallMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that waits for a gateway. `request` names this asking; several may ask for one call by its key.

    `reply_to` is a core subject on which the asker listens for the answer now; whoever comes later asks again by the
    key, or for the call by its id.
    """

    request: Token
    callee: Token
    body: Raw
    tenant: Token = "default"
    agent: Token = "anonymous"
    key: Key | None = None
    call: CallId | None = None
    """Id of the call where there is no key: made by whoever accepted it."""
    reply_to: Annotated[str, Meta(max_length=256)] | None = None
    to_mailbox: bool = False
    """The answer is stored on the reply lane of `agent` too, before the call is acked."""
    message_id: Annotated[str, Meta(max_length=256)] | None = None
    step: Annotated[str, Meta(max_length=256)] | None = None
    parent: CallId | None = None
    conversation: Annotated[str, Meta(max_length=256)] | None = None
    task: Annotated[str, Meta(max_length=256)] | None = None
    asked_us: Micros = 0
    traceparent: Annotated[str, Meta(max_length=64)] | None = None
    """The asker's trace, where the message has no such header."""
    until_us: Micros | None = None
    """Until when the asker waits for a call that another one is running already."""
    deadline_us: Micros | None = None


class CallAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `hr.api.call`."""

    callee: Token
    body: Raw
    tenant: Token | None = None
    agent: Token = "anonymous"
    key: Key | None = None
    wait_s: Annotated[float, Meta(ge=0, le=3_600)] = 4.0
    """How long to wait for the answer; after it the answer is `in_progress` with the call's id."""
    task: Annotated[str, Meta(max_length=256)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None


class AnswerUsage(Struct, frozen=True, kw_only=True):
    """`CallUsage` as it is answered: with every field, whatever its value."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    source: str = "provider"


class CallAnswer(Struct, frozen=True, kw_only=True):
    """Where a call stands. Amounts are micro-units of money; `error` has `type` and `message`."""

    call_id: str
    state: AnswerState
    attempt: int = 0
    replayed: bool = False
    outcome: dict[str, Any] | None = None
    usage: AnswerUsage | None = None
    posted_micro: int = 0
    held_micro: int = 0
    error: dict[str, Any] | None = None


# --- looking at calls, and deciding about them ------------------------------------------------------


class CallRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `calls.show`: one call by its id; `tenant` where an id stands in several."""

    call: CallId
    tenant: Token | None = None


class CallHistory(Struct, frozen=True, kw_only=True):
    """All that is known of a call: its records and the evidence, each in order, and where it stands by them."""

    call_id: str
    tenant: str
    state: str
    callee: str
    agent: str
    effect: str
    posted_micro: int
    held_micro: int
    records: list[dict[str, Any]]
    evidence: list[dict[str, Any]]


class CallDecision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `calls.resolve`: what an operator found out about a call in doubt."""

    call: CallId
    verdict: Literal["applied", "not-applied"]
    tenant: Token | None = None
    cost_micro: Annotated[int, Meta(ge=0, le=10**15)] | None = None
    why: Annotated[str, Meta(min_length=1, max_length=2_048)]
    by: Annotated[str, Meta(min_length=1, max_length=256)] = "operator"


class CallApproval(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `calls.approve` and `calls.deny`."""

    call: CallId
    tenant: Token | None = None
    why: Annotated[str, Meta(max_length=2_048)] = ""
    by: Annotated[str, Meta(min_length=1, max_length=256)] = "operator"


class CallsWaiting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `calls.waiting`: the calls that wait for approval."""

    tenant: Token | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100


class CallWaiting(Struct, frozen=True, kw_only=True):
    """A call that waits for approval; `calls.show` has its body."""

    call: str
    tenant: str
    agent: str
    callee: str
    effect: str
    asked_us: int
    model: str | None = None
    why: str = ""
    deadline_us: int | None = None
    state: str = "awaiting_approval"


class CallsWaitingReply(Struct, frozen=True, kw_only=True):
    """Reply of `calls.waiting`, the oldest first."""

    calls: list[CallWaiting]


class BudgetOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `budget.set`."""

    budget: Token
    unit: Unit
    limit: Annotated[int, Meta(ge=0, le=10**15)]
    tenant: Token | None = None
    agent: Token | None = None
    period: Period = "none"


class BudgetQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `budget.show`: the budgets of a tenant, or of all, in their current periods."""

    tenant: Token | None = None
    budget: Token | None = None


class BudgetLine(Struct, frozen=True, kw_only=True):
    """One budget in its current period. `held` includes `held_in_doubt`."""

    name: str
    tenant: str
    unit: str
    limit: int
    posted: int
    held: int
    held_in_doubt: int
    overrun: int
    period: str
    agent: str | None = None
