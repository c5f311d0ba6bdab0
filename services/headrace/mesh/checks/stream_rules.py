"""Settings of a stream that would lose, hide or refuse work: one table, relative to the stream's specification.

Each rule was tried on nats-server 2.15.1. A stream may also differ harmlessly from its specification (compression,
placement, …); what no rule names and is neither specified nor known to be harmless is told as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

from msgspec import Struct

from headrace.contracts.api import Finding
from headrace.contracts.specs import StreamSpec

Config = Mapping[str, Any]
HARMLESS: Final = frozenset({
    "metadata", "compression", "placement", "first_seq", "allow_batched", "allow_msg_ttl", "subject_delete_marker_ttl",
    "mirror_direct", "template_owner", "description", "duplicate_window", "num_replicas", "max_bytes",
})  # fmt: skip
"""Settings that an operator may choose; replicas and sizes have checks of their own."""


class StreamRule(Struct, frozen=True, kw_only=True):
    """One setting that may be wrong.

    `stops` says that work is lost or goes astray there: no service starts on such a stream. `mend` has `{stream}` and
    `{wanted}` in it.
    """

    setting: str
    wrong: Callable[[StreamSpec, Config], bool]
    found: str
    mend: str
    state: Literal["warn", "fail"] = "fail"
    stops: bool = False


def _set(name: str) -> Callable[[StreamSpec, Config], bool]:
    return lambda _spec, config: bool(config.get(name))


def _bounded(name: str) -> Callable[[StreamSpec, Config], bool]:
    """Bounded (above 0), and tighter than the specification."""

    def wrong(spec: StreamSpec, config: Config) -> bool:
        bound, wanted = int(config.get(name) or 0), int(getattr(spec, name))
        return bound > 0 and (wanted <= 0 or bound < wanted)

    return wrong


def _retention(wanted: str) -> Callable[[StreamSpec, Config], bool]:
    return lambda spec, config: spec.retention == wanted != config.get("retention", "limits")


def _consumer_limit(name: str) -> Callable[[StreamSpec, Config], bool]:
    return lambda _spec, config: bool(_value(config, f"consumer_limits.{name}"))


def _value(config: Config, setting: str) -> Any:
    """The value of a (dotted) setting, None if it is not set."""
    name, _, rest = setting.partition(".")
    value = config.get(name)
    return (
        _value(cast("Config", value), rest)
        if rest and isinstance(value, Mapping)
        else None
        if rest
        else value
    )


REMAKE: Final = (
    "it cannot be changed in place: let the mesh finish its jobs, `nats stream rm {stream}`, "
    "then `headrace init`"
)

STREAM_RULES: Final[tuple[StreamRule, ...]] = (
    StreamRule(
        setting="discard",
        wrong=lambda spec, config: config.get("discard", "old") != spec.discard,
        found="a full stream drops its oldest messages, and says nothing",
        mend="set discard: {wanted} (`nats stream edit {stream} --discard {wanted}`)",
        stops=True,
    ),
    StreamRule(
        setting="max_age",
        wrong=_bounded("max_age"),
        found="messages that waited longer than this are removed",
        mend="set max_age: {wanted} (`nats stream edit {stream} --max-age {wanted}ns`)",
        stops=True,
    ),
    StreamRule(
        setting="max_msgs_per_subject",
        wrong=lambda spec, config: (
            _bounded("max_msgs_per_subject")(spec, config) and not config.get("discard_new_per_subject")
        ),
        found="the oldest messages of a subject are dropped, in spite of discard: new",
        mend="set max_msgs_per_subject: {wanted} (`nats stream edit {stream} --max-msgs-per-subject {wanted}`)",
        stops=True,
    ),
    StreamRule(
        setting="discard_new_per_subject",
        wrong=lambda spec, config: (
            bool(config.get("discard_new_per_subject")) and not spec.discard_new_per_subject
        ),
        found="a job with many items is refused although the stream has room",
        mend="set max_msgs_per_subject: {wanted} and discard_new_per_subject: false",
    ),
    StreamRule(
        setting="discard_new_per_subject",
        wrong=lambda spec, config: spec.discard_new_per_subject and not config.get("discard_new_per_subject"),
        found="a full mailbox drops its oldest messages, and tells nobody",
        mend="set discard_new_per_subject: true",
        stops=True,
    ),
    StreamRule(
        setting="max_msgs",
        wrong=_bounded("max_msgs"),
        found="the stream is full at this number of messages",
        mend="set max_msgs: {wanted} (`nats stream edit {stream} --max-msgs {wanted}`); max_bytes bounds a queue",
    ),
    StreamRule(
        setting="max_msg_size",
        wrong=lambda _spec, config: int(config.get("max_msg_size") or -1) > 0,
        found="larger messages are refused, whatever the broker's max_payload",
        mend="set max_msg_size: -1 (`nats stream edit {stream} --max-msg-size -1`)",
    ),
    StreamRule(
        setting="max_consumers",
        wrong=lambda _spec, config: int(config.get("max_consumers") or -1) > 0,
        found="functions whose consumers come later cannot be registered",
        mend="set max_consumers: -1. " + REMAKE,
    ),
    StreamRule(
        setting="retention",
        wrong=_retention("workqueue"),
        found="it is no work queue: acked messages stay, or messages without a consumer are dropped",
        mend="retention has to be {wanted}; " + REMAKE,
        stops=True,
    ),
    StreamRule(
        setting="retention",
        wrong=_retention("limits"),
        found="messages are removed once they are read, and so is what proves the account of jobs",
        mend="retention has to be {wanted}; " + REMAKE,
        stops=True,
    ),
    StreamRule(
        setting="no_ack",
        wrong=_set("no_ack"),
        found="the stream confirms nothing: what is not stored is lost in silence",
        mend="set no_ack: false (`nats stream edit {stream} --ack`)",
        stops=True,
    ),
    StreamRule(
        setting="storage",
        wrong=lambda _spec, config: config.get("storage", "file") != "file",
        found="the stream is empty after a restart of the broker",
        mend="storage has to be file; " + REMAKE,
        stops=True,
    ),
    StreamRule(
        setting="persist_mode",
        wrong=lambda _spec, config: config.get("persist_mode", "default") not in {"default", ""},
        found="messages are acknowledged before they are written",
        mend="persist_mode has to be default; " + REMAKE,
    ),
    StreamRule(
        setting="sealed",
        wrong=_set("sealed"),
        found="the stream takes no more messages, and gives none up",
        mend="a sealed stream stays sealed: `nats stream rm {stream}`, then `headrace init`",
        stops=True,
    ),
    StreamRule(
        setting="mirror",
        wrong=_set("mirror"),
        found="it copies another stream, and takes no messages of its own",
        mend="no mirror belongs here; " + REMAKE,
        stops=True,
    ),
    StreamRule(
        setting="sources",
        wrong=_set("sources"),
        found="messages of other streams come in between, and count in no job",
        mend="remove the sources (`nats stream edit {stream}`)",
    ),
    StreamRule(
        setting="subject_transform",
        wrong=_set("subject_transform"),
        found="messages are stored under other subjects, where no consumer finds them",
        mend="remove the subject transform (`nats stream edit {stream}`)",
        stops=True,
    ),
    StreamRule(
        setting="republish",
        wrong=_set("republish"),
        found="each message is sent on to another subject as well: prompts and answers are seen there",
        mend="remove republish (`nats stream edit {stream}`), if that is not meant",
        state="warn",
    ),
    StreamRule(
        setting="deny_purge",
        wrong=lambda spec, config: bool(config.get("deny_purge")) and not spec.deny_purge,
        found="a job cannot be cancelled: its tasks cannot be purged",
        mend="deny_purge has to be false; " + REMAKE,
    ),
    StreamRule(
        setting="consumer_limits.max_ack_pending",
        wrong=_consumer_limit("max_ack_pending"),
        found="consumers that are allowed more leases cannot be made",
        mend="remove consumer_limits.max_ack_pending (`nats stream edit {stream}`)",
    ),
    StreamRule(
        setting="consumer_limits.inactive_threshold",
        wrong=_consumer_limit("inactive_threshold"),
        found="new consumers are removed when nobody pulls for this time",
        mend="remove consumer_limits.inactive_threshold (`nats stream edit {stream}`)",
    ),
)


def broken_rules(spec: StreamSpec, config: Config) -> list[StreamRule]:
    """The rules that a stream's configuration breaks."""
    return [rule for rule in STREAM_RULES if rule.wrong(spec, config)]


def forbidden(spec: StreamSpec, config: Config) -> list[str]:
    """What a stream has and must not have, one line each, beyond the settings that its specification names."""
    specified = spec.config()
    return [
        f"stream {spec.name}: {rule.setting} is {shown_value(config, rule.setting)}, should not be set"
        for rule in broken_rules(spec, config)
        if rule.state == "fail" and rule.setting not in specified
    ]


def shown_value(config: Config, setting: str) -> str:
    """The value of a (dotted) setting, for people."""
    value = _value(config, setting)
    is_duration = setting.endswith(("max_age", "inactive_threshold"))
    return f"{value / 1e9:g} s" if is_duration and isinstance(value, int) else str(value)


def describe(rule: StreamRule, spec: StreamSpec, config: Config) -> Finding:
    """The finding of a broken rule."""
    return Finding(
        check=f"stream {spec.name}",
        state=rule.state,
        found=f"{rule.setting} is {shown_value(config, rule.setting)}: {rule.found}",
        mend=rule.mend.format(stream=spec.name, wanted=getattr(spec, rule.setting, "")),
    )


def unknown_settings(spec: StreamSpec, config: Config) -> list[str]:
    """Settings in force that neither the specification nor a rule knows: of a newer server, say."""
    known = {*spec.config(), *HARMLESS, *(rule.setting.partition(".")[0] for rule in STREAM_RULES)}
    return [f"{key} is {value!r}" for key, value in config.items() if value and key not in known]
