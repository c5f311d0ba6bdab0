"""The records that a gateway writes of a call: its intents, and what came of each attempt."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.contracts.account import CallView, settle
from headrace.contracts.calls import CallMessage
from headrace.contracts.errors import InvalidInput
from headrace.contracts.ledger import (
    DANGEROUS,
    AttemptFailed,
    CallError,
    CallOutcome,
    CallRecord,
    CallRequest,
    Completed,
    Failed,
    InDoubt,
    Intent,
    Reservation,
)
from headrace.contracts.messages import Blob
from headrace.gateway.callees import Body, Callee, actual, worst_case
from headrace.gateway.dialing import Attempted
from headrace.gateway.keys import call_id, key_hash
from headrace.gateway.verdicts import Verdict, last_verdict, may_have_applied, verdict

SECOND_US = 1_000_000
LEASE_GRACE_S = 5.0
"""How long after an attempt's time-out its owner has certainly written what came of it, or is dead."""


class Me(Struct, frozen=True):
    """Who writes: this gateway and its life."""

    owner: str
    epoch: int


class Asked(Struct, frozen=True):
    """A call as it was asked: what follows from the message and the callee alone."""

    message: CallMessage
    callee: Callee
    body: Body
    call: str
    fingerprint: str


def name_of(message: CallMessage) -> str:
    """The id of the call that a message asks for; raise `InvalidInput` if it has neither a key nor an id."""
    if message.key is not None:
        return call_id(message.tenant, message.agent, message.key)
    if message.call is None:
        raise InvalidInput("the call has neither a key nor an id", field="key")
    return message.call


def intent_of(
    me: Me,
    asked: Asked,
    view: CallView | None,
    held: list[Reservation],
    now_us: int,
    *,
    body: Blob | None = None,
) -> Intent:
    """The intent of the next attempt. What was asked, and the key that the callee gets, stay those of the first."""
    callee = asked.callee
    first = None if view is None else view.attempts[0].intent
    return Intent(
        call=asked.call,
        tenant=asked.message.tenant,
        attempt=1 if view is None else len(view.attempts) + 1,
        owner=me.owner,
        epoch=me.epoch,
        at_us=now_us,
        lease_until_us=now_us + int((callee.settings.timeout_s + LEASE_GRACE_S) * SECOND_US),
        request=replace(request_of(asked), body=body) if first is None else first.request,
        reservations=held,
        asked_by=asked.message.request,
        remote_key=_remote_key(callee, asked.call) if first is None else first.remote_key,
        price_version=callee.price.version if callee.price else None,
        max_cost_micro=worst_case(callee, asked.body)["micro"] or 0,
    )


def end_of(
    me: Me, callee: Callee, view: CallView, attempted: Attempted, *, more: bool, now_us: int
) -> CallRecord:
    """What is written of the last attempt; `more`: a further one may follow."""
    unknown = any(isinstance(a.end, AttemptFailed) and a.end.may_have_applied for a in view.attempts)
    effect, seen, attempt = callee.effect, attempted.seen, view.last
    found = verdict(effect, seen) if more else last_verdict(effect, seen, unknown_before=unknown)
    if found is Verdict.FAILED and unknown:
        found = Verdict.IN_DOUBT
    retry_us = None if attempted.retry_after_s is None else int(attempted.retry_after_s * SECOND_US)
    common: dict[str, Any] = {
        "call": view.call, "tenant": view.tenant, "attempt": attempt.intent.attempt, "owner": me.owner,
        "epoch": me.epoch, "at_us": now_us, "times": attempted.times,
    }  # fmt: skip
    if found in (Verdict.COMPLETED, Verdict.PARTIAL):
        return Completed(
            **common,
            outcome=attempted.outcome or CallOutcome(),
            usage=attempted.usage,
            cost_micro=actual(callee, attempted.usage)["micro"],
            postings=settle(attempt, actual(callee, attempted.usage)),
        )
    if found is Verdict.IN_DOUBT:
        return InDoubt(**common, error=attempted.error, request_sent=attempted.request_sent)
    if more and found is not Verdict.FAILED:
        return AttemptFailed(
            **common,
            error=attempted.error,
            request_sent=attempted.request_sent,
            may_have_applied=found is Verdict.AGAIN and may_have_applied(effect, seen),
            charge_unverified=found is Verdict.UNVERIFIED,
            retry_after_us=retry_us,
            postings=settle(attempt),
        )
    return Failed(
        **common,
        error=attempted.error,
        retryable=found is not Verdict.FAILED,
        retry_after_us=retry_us,
        request_sent=attempted.request_sent,
        postings=settle(attempt),
    )


def superseded(me: Me, view: CallView, now_us: int) -> AttemptFailed:
    """Ends an attempt in doubt whose callee will know the next one as the same call, by the key that both carry."""
    end = view.last.end
    error = end.error if isinstance(end, InDoubt) else CallError(type="in_doubt")
    return AttemptFailed(
        call=view.call, tenant=view.tenant, attempt=view.last.intent.attempt, owner=me.owner, epoch=me.epoch,
        at_us=now_us, error=error, request_sent=True, may_have_applied=view.request.effect != "read",
        postings=settle(view.last),
    )  # fmt: skip


def given_up(me: Me, view: CallView, error: CallError, now_us: int) -> CallRecord:
    """Ends a call that was to be tried again and may not: failed, or in doubt where an attempt may have applied it."""
    common: dict[str, Any] = {
        "call": view.call, "tenant": view.tenant, "attempt": view.last.intent.attempt, "owner": me.owner,
        "epoch": me.epoch, "at_us": now_us, "error": error,
    }  # fmt: skip
    if any(isinstance(a.end, AttemptFailed) and a.end.may_have_applied for a in view.attempts):
        return InDoubt(**common)
    return Failed(**common, retryable=True, postings=settle(view.last))


def request_of(asked: Asked) -> CallRequest:
    """What was asked, as records say it."""
    message, callee, body = asked.message, asked.callee, asked.body
    return CallRequest(
        callee=callee.name,
        effect=callee.effect,
        principal=message.agent,
        fingerprint=asked.fingerprint,
        operation=callee.settings.path[:256],
        key_hash=None if message.key is None else key_hash(message.key),
        model=body.model and body.model[:512],
        max_output_tokens=body.max_output_tokens,
        message_id=message.message_id,
        step=message.step,
        parent=message.parent,
        conversation=message.conversation,
        task=message.task,
        deadline_us=message.deadline_us,
        traceparent=message.traceparent,
    )


def _remote_key(callee: Callee, call: str) -> str | None:
    return f"hr-{call}" if callee.effect in ("idempotent", *DANGEROUS) else None
