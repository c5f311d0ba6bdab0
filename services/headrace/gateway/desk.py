"""What the gateway answers beside calls: histories, an operator's decisions, approvals, budgets, the ledger's proof."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.contracts.account import view_of
from headrace.contracts.calls import (
    BudgetLine,
    BudgetOrder,
    BudgetQuery,
    CallAnswer,
    CallApproval,
    CallDecision,
    CallHistory,
    CallRef,
    CallsWaiting,
    CallsWaitingReply,
)
from headrace.contracts.errors import InvalidInput, NotFound
from headrace.contracts.ledger import BudgetHead, PeriodAccount
from headrace.gateway.answers import answer_of, held_micro, posted_micro
from headrace.gateway.approvals import Approvals, Decision
from headrace.gateway.book import period_name
from headrace.gateway.budgets import Budgets
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.ledger import StreamLedger
from headrace.gateway.resolve import Resolver
from headrace.gateway.verify import Verification, verify
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import next_message, stream_info
from headrace.mesh.microservice import ApiServer

MAX_NAMED = 20
REPLY_MARGIN_BYTES = 1_024


class Desk:
    """The endpoints of one gateway for people: `serve` adds them to a server."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        ledger: StreamLedger,
        evidence: EvidenceStream,
        approvals: Approvals,
        budgets: Budgets,
        resolver: Resolver,
    ) -> None:
        self._mesh = mesh
        self._ledger = ledger
        self._evidence = evidence
        self._approvals = approvals
        self._budgets = budgets
        self._resolver = resolver

    def serve(self, server: ApiServer) -> None:
        """Add the endpoints."""
        server.endpoint("calls.show", CallRef, self.show)
        server.endpoint("calls.resolve", CallDecision, self.decide, timeout_s=40.0)
        server.endpoint("calls.waiting", CallsWaiting, self.waiting, timeout_s=30.0)
        server.endpoint("calls.approve", CallApproval, self.approve)
        server.endpoint("calls.deny", CallApproval, self.deny)
        server.endpoint("budget.set", BudgetOrder, self.set_budget)
        server.endpoint("budget.show", BudgetQuery, self.show_budgets)
        server.endpoint("ledger.verify", dict[str, Any], self.verify, timeout_s=600.0)

    # --- calls -------------------------------------------------------------------------------------
    async def show(self, request: CallRef, _headers: Mapping[str, str]) -> CallHistory:
        """A call's records and evidence in order."""
        tenant = await self._tenant(request.call, request.tenant)
        records = (await self._ledger.call(tenant, request.call)).records
        evidence = await self._evidence.of(tenant, request.call)
        if not records and not evidence:
            raise NotFound(f"no call {request.call!r} of tenant {tenant}", code="unknown_call")
        view = view_of(records)
        rejected = next((e for e in reversed(evidence) if e.kind == "rejected"), None)
        approval = await self._approvals.of(tenant, request.call)
        asked = view.request if view else (approval.asked.request if approval.asked else None)
        if view is not None:
            state = view.state
        else:
            state = {"waiting": "awaiting_approval", "approved": "approved"}.get(approval.state, "refused")
        history = CallHistory(
            call_id=request.call,
            tenant=tenant,
            state=state,
            callee=asked.callee if asked else "",
            agent=asked.principal if asked else (rejected.by if rejected else ""),
            effect=asked.effect if asked else "",
            posted_micro=posted_micro(view) if view else 0,
            held_micro=held_micro(view) if view else 0,
            records=[msgspec.to_builtins(r) for r in records],
            evidence=[msgspec.to_builtins(e) for e in evidence],
        )
        if len(msgspec.json.encode(history)) + REPLY_MARGIN_BYTES > self._mesh.max_payload:
            for entry in (*history.records, *history.evidence):
                outcome: dict[str, Any] = entry.get("outcome") or {}
                if outcome.pop("body", None) is not None:
                    outcome["body_left_out"] = True
        return history

    async def decide(self, request: CallDecision, _headers: Mapping[str, str]) -> CallAnswer:
        """End a call in doubt."""
        tenant = await self._tenant(request.call, request.tenant)
        view = await self._resolver.decide(
            tenant,
            request.call,
            applied=request.verdict == "applied",
            cost_micro=request.cost_micro,
            why=request.why,
            by=request.by,
        )
        return answer_of(view)

    async def approve(self, request: CallApproval, _headers: Mapping[str, str]) -> CallAnswer:
        """Let a call that waits for approval be made."""
        return await self._decision(request, "approved")

    async def deny(self, request: CallApproval, _headers: Mapping[str, str]) -> CallAnswer:
        """Refuse a call that waits for approval."""
        return await self._decision(request, "denied")

    async def waiting(self, request: CallsWaiting, _headers: Mapping[str, str]) -> CallsWaitingReply:
        """The calls that wait for approval."""
        return CallsWaitingReply(calls=await self._approvals.waiting(request.tenant, request.limit))

    async def _decision(self, request: CallApproval, decision: Decision) -> CallAnswer:
        tenant = await self._tenant(request.call, request.tenant)
        await self._approvals.decide(tenant, request.call, decision, by=request.by, why=request.why)
        return CallAnswer(call_id=request.call, state="in_progress" if decision == "approved" else "refused")

    async def _tenant(self, call: str, given: str | None) -> str:
        """The tenant in which a call stands; raise `NotFound`, or `InvalidInput` if there are several."""
        if given is not None:
            return given
        tenants: set[str] = set()
        for stream, filter_ in (
            (self._mesh.topology.ledger, f"{self._mesh.subjects.prefix}.ledger.call.*.{call}"),
            (self._mesh.topology.evidence, f"{self._mesh.subjects.prefix}.evidence.*.{call}"),
        ):
            if await next_message(self._mesh, stream, filter_, 1) is None:
                continue
            info = await stream_info(self._mesh, stream, subjects_filter=filter_)
            tenants |= {subject.split(".")[-2] for subject in info["state"]["subjects"]}
        if not tenants:
            raise NotFound(f"no call {call!r}", code="unknown_call")
        if len(tenants) > 1:
            named = ", ".join(sorted(tenants)[:MAX_NAMED])
            raise InvalidInput(f"call {call} stands in several tenants: say which of {named}", field="tenant")
        return tenants.pop()

    # --- budgets and the whole ---------------------------------------------------------------------
    async def set_budget(self, request: BudgetOrder, _headers: Mapping[str, str]) -> BudgetLine:
        """Make a budget or change its limit."""
        tenant = request.tenant or self._mesh.settings.tenant
        head = await self._budgets.set(
            tenant,
            request.budget,
            unit=request.unit,
            limit=request.limit,
            period=request.period,
            agent=request.agent,
        )
        return line_of(head)

    async def show_budgets(self, request: BudgetQuery, _headers: Mapping[str, str]) -> dict[str, Any]:
        """The budgets of a tenant, or of all, as they stand."""
        tenants = [request.tenant] if request.tenant else await self._tenants()
        heads = [h for tenant in tenants for h in await self._budgets.heads(tenant)]
        lines = [line_of(h.head) for h in heads if request.budget in (None, h.head.budget)]
        if request.budget is not None and not lines:
            raise NotFound(f"no budget {request.budget!r}", code="unknown_budget")
        return {"budgets": lines}

    async def _tenants(self) -> list[str]:
        """Every tenant that has a budget."""
        filter_ = self._mesh.subjects.ledger_roster("x").removesuffix("x") + "*"
        info = await stream_info(self._mesh, self._mesh.topology.ledger, subjects_filter=filter_)
        return sorted(subject.rpartition(".")[2] for subject in info["state"]["subjects"])

    async def verify(self, _request: dict[str, Any], _headers: Mapping[str, str]) -> Verification:
        """Read and fold the whole ledger."""
        return await verify(self._mesh, Path(self._mesh.settings.dir))


def line_of(head: BudgetHead) -> BudgetLine:
    """A budget in its current period."""
    period = period_name(head.period, time.time_ns() // 1_000)
    account = head.periods.get(period, PeriodAccount())
    return BudgetLine(
        name=head.budget,
        tenant=head.tenant,
        unit=head.unit,
        limit=head.limit,
        posted=account.posted,
        held=account.held,
        held_in_doubt=account.in_doubt,
        overrun=account.overrun,
        period=head.period,
        agent=head.agent,
    )
