"""Examples of the messages of governed calls, for the golden bytes."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.calls import CallMessage
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    BudgetName,
    CallError,
    CallOutcome,
    CallRequest,
    CallTimes,
    CallUsage,
    Completed,
    Evidence,
    Failed,
    InDoubt,
    Intent,
    PeriodAccount,
    Posting,
    Reservation,
    Roster,
)
from headrace.contracts.messages import Blob

AT = 1_764_547_200_000_000
CALL = "5ie5dqblndjqbh6rqljvqiqgmu"
BLOB = Blob(name="calls/c/1", size=3, digest="SHA-256=abc")
ERROR = CallError(type="http_503", message="try later", status=503)
TIMES = CallTimes(sent_us=AT + 1, first_byte_us=AT + 2, done_us=AT + 3)
USAGE = CallUsage(input_tokens=11, output_tokens=4, cached_tokens=2, reasoning_tokens=1, source="estimated")
OUTCOME = CallOutcome(
    status=200,
    body={"answer": "x"},
    blob=BLOB,
    digest="0" * 64,
    finish_reason="stop",
    partial=True,
    chunks=3,
    provider_request_id="req-1",
    response_id="cmpl-1",
)
POSTINGS = [Posting(budget="spend", unit="micro", reserved=10, amount=7, period="2026-11-30")]
REQUEST = CallRequest(
    callee="llm",
    effect="cost_bearing",
    principal="planner",
    fingerprint="1" * 64,
    operation="/chat/completions",
    key_hash="2" * 64,
    model="m",
    max_output_tokens=50,
    body=BLOB,
    message_id="m-1",
    step="2",
    parent="parent-call",
    conversation="c-1",
    task="review",
    deadline_us=AT + 60,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
COMMON: dict[str, Any] = {
    "call": CALL, "tenant": "acme", "attempt": 2, "owner": "gateway", "epoch": 7, "at_us": AT,
}  # fmt: skip

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "call-1.small": (codec.CALL, CallMessage(request="r", callee="llm", body=Raw(b"{}"), call="c")),
    "call-1.full": (
        codec.CALL,
        CallMessage(
            request="r-1",
            callee="llm",
            body=Raw(b'{"messages":[{"role":"user","content":"hi"}]}'),
            tenant="acme",
            agent="planner",
            key="m-1:2",
            call=CALL,
            reply_to="_INBOX.gateway.1",
            message_id="m-1",
            step="2",
            parent="parent-call",
            conversation="c-1",
            task="review",
            asked_us=AT,
            until_us=AT + 1,
            deadline_us=AT + 60,
        ),
    ),
    "call-record-1.intent": (
        codec.CALL_RECORD,
        Intent(
            **COMMON,
            request=REQUEST,
            lease_until_us=AT + 9,
            reservations=[Reservation(budget="spend", unit="micro", amount=10, period="2026-11-30")],
            asked_by="r-1",
            remote_key="hr-c",
            price_version="1",
            max_cost_micro=10,
        ),
    ),
    "call-record-1.completed": (
        codec.CALL_RECORD,
        Completed(
            **COMMON,
            outcome=OUTCOME,
            usage=USAGE,
            cost_micro=7,
            postings=POSTINGS,
            resolved_by="operator ada",
            why="seen",
            times=TIMES,
        ),
    ),
    "call-record-1.failed": (
        codec.CALL_RECORD,
        Failed(
            **COMMON,
            error=ERROR,
            retryable=True,
            retry_after_us=5,
            request_sent=True,
            cost_micro=1,
            postings=POSTINGS,
            resolved_by="resolver",
            why="no such call",
            times=TIMES,
        ),
    ),
    "call-record-1.attempt-failed": (
        codec.CALL_RECORD,
        AttemptFailed(
            **COMMON,
            error=ERROR,
            request_sent=True,
            may_have_applied=True,
            charge_unverified=True,
            retry_after_us=5,
            postings=POSTINGS,
            times=TIMES,
        ),
    ),
    "call-record-1.in-doubt": (
        codec.CALL_RECORD,
        InDoubt(**COMMON, error=ERROR, request_sent=False, times=TIMES),
    ),
    "budget-head-1.small": (codec.BUDGET_HEAD, BudgetHead(tenant="t", budget="b", unit="calls", limit=10)),
    "budget-head-1.full": (
        codec.BUDGET_HEAD,
        BudgetHead(
            tenant="acme",
            budget="spend",
            unit="micro",
            limit=1_000,
            period="day",
            agent="planner",
            periods={"2026-11-30": PeriodAccount(posted=7, held=3, in_doubt=2, overrun=1)},
            at_us=AT,
        ),
    ),
    "roster-1.full": (
        codec.ROSTER,
        Roster(
            tenant="acme",
            budgets=[BudgetName(budget="spend", unit="micro", period="day", agent="planner")],
            at_us=AT,
        ),
    ),
    "call-1.traced": (
        codec.CALL,
        CallMessage(request="r", callee="llm", body=Raw(b"{}"), key="k", traceparent=REQUEST.traceparent),
    ),
    "evidence-1.approval": (
        codec.EVIDENCE,
        Evidence(
            call=CALL,
            tenant="acme",
            kind="approval_asked",
            by="planner",
            why="it is new",
            request=REQUEST,
            body={"amount": 1, "note": "[redacted]"},
            at_us=AT,
        ),
    ),
    "evidence-1.omitted": (
        codec.EVIDENCE,
        Evidence(
            call=CALL,
            tenant="acme",
            kind="resolver",
            outcome=CallOutcome(status=200, digest="0" * 64, redacted=True, omitted="object_store_away"),
        ),
    ),
    "evidence-1.full": (
        codec.EVIDENCE,
        Evidence(
            call=CALL,
            tenant="acme",
            kind="late_outcome",
            attempt=2,
            by="gateway@6",
            why="fenced",
            outcome=OUTCOME,
            error=ERROR,
            usage=USAGE,
            request=REQUEST,
            at_us=AT,
        ),
    ),
}
