"""Who may call what, whether a person has to say yes first, and how much of a callee is used at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.contracts.errors import Refused
from headrace.contracts.ledger import Evidence
from headrace.gateway.callees import Callee
from headrace.gateway.conduct import Later
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.records import Asked
from headrace.mesh.callee_settings import PolicyRule, PolicySettings

ASK_AGAIN_S = 1.0
"""How often a call that waits for approval looks whether it has come."""


class PolicyGate:
    """The gate of one gateway. Concurrency and rate are this gateway's own."""

    def __init__(self, policy: PolicySettings, evidence: EvidenceStream) -> None:
        self._policy = policy
        self._evidence = evidence
        self._places: dict[str, asyncio.Semaphore] = {}
        self._next_at: dict[str, float] = {}
        self._asked: set[tuple[str, str]] = set()

    async def admit(self, asked: Asked) -> Later | None:
        """Raise `Refused` if a rule or a person denies; `Later` while a person has yet to answer."""
        rule = next((r for r in self._policy.rules if fits(r, asked)), None)
        action = rule.action if rule else self._policy.default
        if action == "deny":
            why = f": {rule.why}" if rule and rule.why else ""
            msg = f"agent {asked.message.agent} of tenant {asked.message.tenant} may not call {asked.callee.name}{why}"
            raise Refused(msg, code="denied")
        if action == "approve" or asked.callee.settings.approval:
            return await self._approval(asked, rule.why if rule else "")
        return None

    async def _approval(self, asked: Asked, why: str) -> Later | None:
        tenant, call = asked.message.tenant, asked.call
        said = {e.kind: e for e in await self._evidence.of(tenant, call)}
        if (denied := said.get("denied")) is not None:
            raise Refused(f"the call was denied: {denied.why or 'no reason given'}", code="denied")
        if "approved" in said:
            return None
        if "approval_asked" not in said and (tenant, call) not in self._asked:
            await self._evidence.store(
                Evidence(
                    call=call, tenant=tenant, kind="approval_asked", by=asked.message.agent, why=why,
                    at_us=time.time_ns() // 1_000,
                )
            )  # fmt: skip
            self._asked.add((tenant, call))
        return Later(ASK_AGAIN_S, awaiting="approval")

    async def turn(self, callee: Callee) -> Callable[[], None]:
        """Wait for a place at the callee, and for its rate."""
        places = self._places.get(callee.name)
        if places is None:
            places = self._places[callee.name] = asyncio.Semaphore(callee.settings.concurrency)
        await places.acquire()
        rate = callee.settings.rate_per_s
        if rate is not None:
            now = time.monotonic()
            at = max(now, self._next_at.get(callee.name, 0.0))
            self._next_at[callee.name] = at + 1.0 / rate
            try:
                await asyncio.sleep(at - now)
            except BaseException:
                places.release()
                raise
        return places.release


def fits(rule: PolicyRule, asked: Asked) -> bool:
    """Whether a rule speaks of this call."""
    return (
        _matches(rule.tenant, asked.message.tenant)
        and _matches(rule.agent, asked.message.agent)
        and _matches(rule.callee, asked.callee.name)
        and _matches(rule.model, asked.body.model or "")
        and rule.effect in (None, asked.callee.effect)
    )


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
