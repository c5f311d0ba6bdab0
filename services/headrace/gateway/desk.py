"""What the gateway answers beside calls: histories, an operator's decisions, approvals, budgets, the ledger's proof."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
)
from headrace.contracts.errors import Conflict, InvalidInput, NotFound
from headrace.contracts.ledger import BudgetHead, Evidence, PeriodAccount
from headrace.gateway.answers import answer_of, held_micro, posted_micro
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


class Desk:
    """The endpoints of one gateway for people: `serve` adds them to a server."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        ledger: StreamLedger,
        evidence: EvidenceStream,
        budgets: Budgets,
        resolver: Resolver,
    ) -> None:
        self._mesh = mesh
        self._ledger = ledger
        self._evidence = evidence
        self._budgets = budgets
        self._resolver = resolver

    def serve(self, server: ApiServer) -> None:
        """Add the endpoints."""
        server.endpoint("calls.show", CallRef, self.show)
        server.endpoint("calls.resolve", CallDecision, self.decide, timeout_s=40.0)
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
        view = view_of(records)
        rejected = next((e for e in evidence if e.kind == "rejected"), None)
        asked = view.request if view else None
        state = view.state if view else ("refused" if rejected else "awaiting_approval")
        return CallHistory(
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
        return await self._approval(request, "approved")

    async def deny(self, request: CallApproval, _headers: Mapping[str, str]) -> CallAnswer:
        """Refuse a call that waits for approval."""
        return await self._approval(request, "denied")

    async def _approval(self, request: CallApproval, kind: Any) -> CallAnswer:
        tenant = await self._tenant(request.call, request.tenant)
        said = {e.kind for e in await self._evidence.of(tenant, request.call)}
        if "approval_asked" not in said:
            raise Conflict(f"call {request.call} does not wait for approval", code="no_approval_asked")
        if kind not in said:
            if said & {"approved", "denied"}:
                raise Conflict(f"call {request.call} was decided before", code="already_decided")
            await self._evidence.store(
                Evidence(
                    call=request.call,
                    tenant=tenant,
                    kind=kind,
                    by=request.by,
                    why=request.why,
                    at_us=time.time_ns() // 1_000,
                )
            )
        return CallAnswer(call_id=request.call, state="in_progress" if kind == "approved" else "refused")

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
        """The budgets of a tenant as they stand."""
        heads = await self._budgets.heads(request.tenant or self._mesh.settings.tenant)
        lines = [line_of(h.head) for h in heads if request.budget in (None, h.head.budget)]
        if request.budget is not None and not lines:
            raise NotFound(f"no budget {request.budget!r}", code="unknown_budget")
        return {"budgets": lines}

    async def verify(self, _request: dict[str, Any], _headers: Mapping[str, str]) -> Verification:
        """Read and fold the whole ledger."""
        return await verify(self._mesh)


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
