"""Settings of a durable consumer that would hold up or lose its messages: one table, as for streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from headrace.contracts.api import Finding
from headrace.contracts.specs import ConsumerSpec

Config = Mapping[str, Any]
HARMLESS: Final = frozenset({
    "metadata", "description", "sample_freq", "num_replicas", "max_ack_pending", "max_waiting", "pause_until",
})  # fmt: skip
"""Settings that an operator may choose, or that have a check of their own."""


class ConsumerRule(Struct, frozen=True, kw_only=True):
    """One setting that may be wrong; `mend` has `{stream}` and `{consumer}` in it."""

    setting: str
    wrong: Callable[[Config], bool]
    found: str
    mend: str
    state: Literal["warn", "fail"] = "fail"


def _set(name: str) -> Callable[[Config], bool]:
    return lambda config: bool(config.get(name))


REMAKE: Final = "`nats consumer rm {stream} {consumer}`, then `headrace init` (its messages stay)"

CONSUMER_RULES: Final[tuple[ConsumerRule, ...]] = (
    ConsumerRule(
        setting="ack_policy",
        wrong=lambda config: config.get("ack_policy", "none") != "explicit",
        found="messages count as done before they are",
        mend=REMAKE,
    ),
    ConsumerRule(
        setting="max_deliver",
        wrong=lambda config: int(config.get("max_deliver") or -1) > 0,
        found="after so many deliveries a message stays in the stream unseen, neither done nor dead",
        mend="set max_deliver: -1 (`nats consumer edit {stream} {consumer} --max-deliver -1`)",
    ),
    ConsumerRule(
        setting="inactive_threshold",
        wrong=_set("inactive_threshold"),
        found="the consumer is removed when nobody pulls for this time, and its leases with it",
        mend=REMAKE,
    ),
    ConsumerRule(
        setting="deliver_subject",
        wrong=_set("deliver_subject"),
        found="it pushes to this subject, ready or not: no service receives that",
        mend=REMAKE,
    ),
    ConsumerRule(
        setting="headers_only",
        wrong=_set("headers_only"),
        found="messages come without their payload, and end as dead letters",
        mend=REMAKE,
    ),
    ConsumerRule(
        setting="backoff",
        wrong=_set("backoff"),
        found="it replaces ack_wait: leases lapse before they are renewed",
        mend=REMAKE,
    ),
    ConsumerRule(
        setting="priority_groups",
        wrong=_set("priority_groups"),
        found="pulls without a group are refused",
        mend=REMAKE,
    ),
    ConsumerRule(setting="max_batch", wrong=_set("max_batch"), found="larger pulls are refused", mend=REMAKE),
    ConsumerRule(
        setting="max_expires", wrong=_set("max_expires"), found="longer pulls are refused", mend=REMAKE
    ),
    ConsumerRule(setting="max_bytes", wrong=_set("max_bytes"), found="larger pulls are refused", mend=REMAKE),
    ConsumerRule(
        setting="mem_storage",
        wrong=_set("mem_storage"),
        found="leases and tries are forgotten at a restart of the broker",
        mend=REMAKE,
        state="warn",
    ),
)


def broken_rules(config: Config) -> list[ConsumerRule]:
    """The rules that a consumer's configuration breaks."""
    return [rule for rule in CONSUMER_RULES if rule.wrong(config)]


def forbidden(spec: ConsumerSpec, config: Config) -> list[str]:
    """What a consumer has and must not have, one line each, beyond the settings that its specification names."""
    specified = spec.config()
    return [
        f"consumer {spec.stream}/{spec.durable}: {rule.setting} is {config.get(rule.setting)!r}, should not be set"
        for rule in broken_rules(config)
        if rule.state == "fail" and rule.setting not in specified
    ]


def describe(rule: ConsumerRule, spec: ConsumerSpec, config: Config) -> Finding:
    """The finding of a broken rule."""
    return Finding(
        check=f"consumer {spec.stream}/{spec.durable}",
        state=rule.state,
        found=f"{rule.setting} is {config.get(rule.setting)!r}: {rule.found}",
        mend=rule.mend.format(stream=spec.stream, consumer=spec.durable),
    )


def unknown_settings(spec: ConsumerSpec, config: Config) -> list[str]:
    """Settings in force that neither the specification nor a rule knows."""
    known = {*spec.config(), *HARMLESS, *(rule.setting for rule in CONSUMER_RULES)}
    return [f"{key} is {value!r}" for key, value in config.items() if value and key not in known]
