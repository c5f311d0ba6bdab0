"""What `headrace.toml` declares for governed calls: `[callees.NAME]`, their prices, and the policy over them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from headrace.contracts.ledger import Effect
from headrace.contracts.names import Token

Micro = Annotated[int, Meta(ge=0, le=10**15)]
"""Micro-units of money."""
Wait = Annotated[float, Meta(gt=0, le=86_400)]


class PriceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[callees.NAME.price]`: in micro-units of money for a million tokens. A new price gets a new version."""

    version: Annotated[str, Meta(min_length=1, max_length=64)]
    input_micro_per_mtok: Micro = 0
    output_micro_per_mtok: Micro = 0
    cached_micro_per_mtok: Micro | None = None
    micro_per_call: Micro = 0


class ResolverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[callees.NAME.resolver]`: where to ask whether a call in doubt was applied.

    A GET of `path` (`{key}`, `{call}` are replaced) at the callee: 200 means applied (the body is the outcome), 404 not
    applied (which counts once `settle_delay_s` is over), anything else unknown.
    """

    path: Annotated[str, Meta(min_length=1, max_length=1_024)]


class CalleeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[callees.NAME]`: something that can be called, and what that does to the world."""

    kind: Literal["openai", "http", "function"]
    effect: Effect
    base_url: Annotated[str, Meta(max_length=2_048)] = ""
    path: Annotated[str, Meta(max_length=1_024)] = ""
    """Path under `base_url`; of an `openai` callee `/chat/completions` if it is empty."""
    method: Literal["POST", "PUT", "PATCH", "DELETE", "GET"] = "POST"
    api_key_env: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = None
    """Environment variable that holds the secret; its value is in no setting, record or log."""
    function: Token | None = None
    """Registered function of a `function` callee; by default the callee's own name."""
    model: Annotated[str, Meta(max_length=512)] | None = None
    """Model that a body without one gets."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=10**7)] | None = None
    """Bound of the answer that a body without one gets."""
    timeout_s: Wait = 120.0
    connect_timeout_s: Wait = 10.0
    idempotency_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}$")] = "Idempotency-Key"
    """Header in which an idempotent callee gets the call's key."""
    settle_delay_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long after an attempt the callee's "no such call" may still be premature."""
    resolver: ResolverSettings | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Attempts of one asking, where the effect allows further ones."""
    retry_cap_s: Wait = 30.0
    """Longest pause between two attempts; a callee that asks for a longer one fails the call, retryable."""
    repeat_charged: bool = False
    """Whether a language model's call in doubt may be made again at the risk of paying twice."""
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Calls of one gateway at once."""
    rate_per_s: Annotated[float, Meta(gt=0, le=10**6)] | None = None
    """Calls that one gateway begins in a second."""
    max_answer_bytes: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 33_554_432
    """An answer is read up to here; what is longer is cut, and the call ends as such a callee's effect says."""
    approval: bool = False
    """Whether a person has to approve each call first."""
    free: bool = False
    """It costs no money: it needs no price where a budget counts money."""
    price: PriceSettings | None = None


class PolicyRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[policy.rules]]`: the first rule that fits decides. Names may end in `*`; a field left out fits everything."""

    action: Literal["allow", "deny", "approve"]
    tenant: Annotated[str, Meta(max_length=129)] = "*"
    agent: Annotated[str, Meta(max_length=129)] = "*"
    callee: Annotated[str, Meta(max_length=129)] = "*"
    model: Annotated[str, Meta(max_length=512)] = "*"
    effect: Effect | None = None
    why: Annotated[str, Meta(max_length=512)] = ""
    """What a refused caller, or who has to approve, is told."""
    max_tokens_per_call: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    """A call that may take more (its input, counted as bytes, and its output limit) is refused."""
    calls_per_min: Annotated[float, Meta(gt=0, le=10**7)] | None = None
    """Calls that one gateway begins in a minute; further ones wait."""
    tokens_per_min: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """Tokens that these may take; what a call did not need is given back."""
    per: Literal["agent", "tenant", "rule"] = "agent"
    """Whom the two rates count: each agent of each tenant, each tenant, or all that the rule fits together."""

    def __post_init__(self) -> None:
        limits = (self.max_tokens_per_call, self.calls_per_min, self.tokens_per_min)
        if self.action == "deny" and any(limit is not None for limit in limits):
            raise ValueError("a rule that denies has no limits")


class PolicySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[policy]`: who may call what."""

    rules: list[PolicyRule] = []
    default: Literal["allow", "deny"] | None = None
    """What becomes of a call that no rule fits. By default it is denied where there are rules, else allowed."""
    redact: list[Annotated[str, Meta(max_length=256)]] = []
    """Regular expressions; what they match in captured bodies and errors is replaced. A live answer stays as it is."""
    capture_requests: bool = False
    """Whether the body of each call is kept beside its records, redacted, as an object."""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as e:
                msg = f"policy.redact: {pattern!r} is no regular expression: {e}"
                raise ValueError(msg) from None


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway]`: one gateway among several."""

    name: Token | None = None
    """Name that stays over restarts, of one gateway at a time: after a restart it takes its own open calls up at once.

    Without one, a gateway's open calls wait until their leases are over.
    """
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 512
    """Calls that are under way at once."""
    outcome_bytes: Annotated[int, Meta(ge=0, le=900_000)] = 262_144
    """Answers up to this size stand in the ledger itself; larger ones as objects beside it."""
