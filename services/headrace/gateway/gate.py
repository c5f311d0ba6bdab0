"""Who may call what, whether a person has to say yes first, and how much of a callee is used at once.

The first rule that fits a call decides. Without any rule everything is allowed; where there are rules, what none of
them names is denied, unless `default` says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.contracts.errors import Refused
from headrace.gateway.approvals import Approvals
from headrace.gateway.limits import Limits
from headrace.gateway.records import Asked
from headrace.gateway.turns import Turns
from headrace.gateway.way import Denied, Later, OtherBody
from headrace.mesh.callee_settings import PolicyRule, PolicySettings

SOON_S, LATE_S = 0.5, 10.0
"""How often a call that waits for approval looks whether it has come: the longer it waits, the less often."""


class PolicyGate:
    """The gate of one gateway. Concurrency and rates are this gateway's own.

    `shown` gives what a person sees of a call's body.
    """

    def __init__(
        self,
        policy: PolicySettings,
        approvals: Approvals,
        turns: Turns,
        *,
        shown: Callable[[Asked], Awaitable[dict[str, Any]]],
    ) -> None:
        self._policy = policy
        self._approvals = approvals
        self._turns = turns
        self._shown = shown
        self.limits = Limits()

    async def admit(self, asked: Asked) -> Later | None:
        """Raise `Refused` if a rule or a person denies; `Later` while a person has yet to answer.

        Raise `OtherBody` if a person was asked about another body under the same key.
        """
        _, rule = self._rule(asked)
        action = rule.action if rule else self._default()
        if action == "deny":
            why = f": {rule.why}" if rule and rule.why else ""
            msg = f"agent {asked.message.agent} of tenant {asked.message.tenant} may not call {asked.callee.name}{why}"
            raise Refused(msg, code="denied")
        if action == "approve" or asked.callee.settings.approval:
            return await self._approval(asked, rule.why if rule else "")
        return None

    async def turn(self, asked: Asked) -> Callable[[], None]:
        """Wait for a place at the callee; call what is returned when it is free again.

        Raise `NotYet` if a rule's rate or the callee is used up, `Refused` if a rule never lets so much through.
        """
        number, rule = self._rule(asked)
        give_back = (lambda: None) if rule is None else self.limits.take(number, rule, asked)
        try:
            free = await self._turns.take(asked.callee, (asked.message.tenant, asked.call))
        except BaseException:
            give_back()
            raise

        def over() -> None:
            free()
            give_back()  # of a call that was made, nothing is left to be given back

        return over

    def _rule(self, asked: Asked) -> tuple[int, PolicyRule | None]:
        return next(((n, r) for n, r in enumerate(self._policy.rules) if fits(r, asked)), (-1, None))

    def _default(self) -> str:
        return self._policy.default or ("deny" if self._policy.rules else "allow")

    async def _approval(self, asked: Asked, why: str) -> Later | None:
        tenant, call = asked.message.tenant, asked.call
        found = await self._approvals.of(tenant, call)
        if found.fingerprint not in (None, asked.fingerprint):
            raise OtherBody
        if found.state == "approved":
            return None
        if found.state == "denied":
            said = found.decided.why if found.decided else ""
            raise Denied(f"the call was denied: {said or 'no reason given'}")
        waited_s = 0.0
        if found.asked is None:
            await self._approvals.ask(found, tenant, call, why=why, **await self._shown(asked))
        else:
            waited_s = time.time() - found.asked.at_us / 1e6
        return Later(min(LATE_S, max(SOON_S, waited_s / 30)), awaiting="approval", call=call)


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
