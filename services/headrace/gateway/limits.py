"""Calls and tokens that a rule of the policy lets begin in a minute: buckets that fill all the time.

A call takes what it may need at most, and gives back what it did not once that is known. Every gateway counts by
itself: what must hold over all of them is a budget.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from headrace.contracts.errors import Refused
from headrace.gateway.callees import worst_case
from headrace.gateway.records import Asked
from headrace.gateway.way import Later, NotYet
from headrace.mesh.callee_settings import PolicyRule

MINUTE_S = 60.0
SHORTEST_S, LONGEST_S = 0.1, 15.0
FORGET_OVER = 10_000
"""Buckets that are remembered before full ones are forgotten: agents may have names without end."""

Who = tuple[int, str, str]
"""A rule's number, and the tenant and agent that it counts."""


class _Bucket:
    """Holds what may be taken at once, at most a minute's worth."""

    def __init__(self, per_minute: float, now: float, *, of_tokens: bool) -> None:
        self.of_tokens = of_tokens
        self.most = self.left = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._at = now
        self._promised = now
        """When all who were sent away to come again will have had their share."""

    def fill(self, now: float) -> float:
        self.left = min(self.most, self.left + (now - self._at) * self._per_s)
        self._at = now
        return self.left

    def lacks(self, amount: float, now: float) -> bool:
        return self.fill(now) < amount

    def come_again_s(self, amount: float, now: float) -> float:
        """How long until `amount` is there after all who were sent away before."""
        due = max(now + (amount - self.left) / self._per_s, self._promised + amount / self._per_s)
        self._promised = min(due, now + LONGEST_S)
        return min(LONGEST_S, max(SHORTEST_S, due - now)) * random.uniform(0.9, 1.1)


class Limits:
    """The buckets of one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[Who, _Bucket] = {}
        self._tokens: dict[Who, _Bucket] = {}
        self._taken: dict[tuple[str, str], list[tuple[_Bucket, int]]] = {}
        """What a call has taken, by tenant and call, until it is known what it used; its tokens last."""

    def take(self, number: int, rule: PolicyRule, asked: Asked) -> Callable[[], None]:
        """Take what the call may need under a rule; call what is returned to give it back.

        Raise `Refused` if the rule never lets so much through, `NotYet` if it does not now.
        """
        tokens = 0
        if rule.max_tokens_per_call is not None or rule.tokens_per_min is not None:
            tokens = _tokens(asked)
            most = min(n for n in (rule.max_tokens_per_call, rule.tokens_per_min) if n is not None)
            if tokens > most:
                msg = f"the call may take {tokens} tokens, and the policy lets {most} through"
                raise Refused(msg, code="token_limit")
        if rule.calls_per_min is None and rule.tokens_per_min is None:
            return lambda: None
        message, now = asked.message, self._clock()
        who = (
            number,
            "" if rule.per == "rule" else message.tenant,
            message.agent if rule.per == "agent" else "",
        )
        wanted: list[tuple[_Bucket, int]] = []
        if rule.calls_per_min is not None:
            wanted.append((_of(self._calls, who, rule.calls_per_min, now, of_tokens=False), 1))
        if rule.tokens_per_min is not None:
            wanted.append((_of(self._tokens, who, rule.tokens_per_min, now, of_tokens=True), tokens))
        if any(bucket.lacks(amount, now) for bucket, amount in wanted):
            raise NotYet(Later(max(bucket.come_again_s(amount, now) for bucket, amount in wanted)))
        for bucket, amount in wanted:
            bucket.left -= amount
        self._taken[message.tenant, asked.call] = wanted
        return lambda: self._give_back(message.tenant, asked.call)

    def used(self, tenant: str, call: str, tokens: int | None) -> None:
        """The call was made and took `tokens`, so the rest is there again; None: nobody knows, and all is gone."""
        wanted = self._taken.pop((tenant, call), [])
        if tokens is not None and wanted:
            bucket, taken = wanted[-1]
            if bucket.of_tokens:
                bucket.left = min(bucket.most, bucket.left + taken - tokens)

    def _give_back(self, tenant: str, call: str) -> None:
        """The call was not made after all."""
        for bucket, amount in self._taken.pop((tenant, call), []):
            bucket.left = min(bucket.most, bucket.left + amount)


def _tokens(asked: Asked) -> int:
    tokens = worst_case(asked.callee, asked.body)["tokens"]
    if tokens is None:
        msg = "the call has no limit of output tokens, and the policy bounds tokens: give it max_tokens"
        raise Refused(msg, code="token_limit")
    return tokens


def _of(buckets: dict[Who, _Bucket], who: Who, per_minute: float, now: float, *, of_tokens: bool) -> _Bucket:
    found = buckets.get(who)
    if found is None:
        if len(buckets) >= FORGET_OVER:
            for full in [key for key, b in buckets.items() if b.fill(now) >= b.most]:
                del buckets[full]
        found = buckets[who] = _Bucket(per_minute, now, of_tokens=of_tokens)
    return found
