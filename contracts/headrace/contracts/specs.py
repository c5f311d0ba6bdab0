"""What a stream, a bucket and a durable consumer are, in the words of JetStream's API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class StreamSpec(Struct, frozen=True, kw_only=True):
    """Configuration of one stream, in the words of JetStream's API. Times in nanoseconds, sizes in bytes."""

    name: str
    subjects: list[str]
    retention: Literal["workqueue", "limits"]
    discard: Literal["new", "old"] = "new"
    max_bytes: int = -1
    max_msgs: int = -1
    max_age: int = 0
    max_msgs_per_subject: int = -1
    duplicate_window: int = 120_000_000_000
    allow_atomic: bool = False
    allow_direct: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    discard_new_per_subject: bool = False
    """A subject that holds `max_msgs_per_subject` refuses, and the others go on."""
    description: str = ""

    def config(self, *, replicas: int = 1) -> dict[str, Any]:
        """The `STREAM.CREATE` body."""
        body: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "subjects": self.subjects,
            "retention": self.retention,
            "storage": "file",
            "discard": self.discard,
            "max_consumers": -1,
            "max_msgs": self.max_msgs,
            "max_bytes": self.max_bytes,
            "max_age": self.max_age,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "max_msg_size": -1,
            "num_replicas": replicas,
            "duplicate_window": min(self.duplicate_window, self.max_age)
            if self.max_age
            else self.duplicate_window,
            "allow_direct": self.allow_direct,
            "deny_delete": self.deny_delete,
            "deny_purge": self.deny_purge,
            "allow_rollup_hdrs": self.allow_rollup_hdrs,
        }
        if self.allow_atomic:
            body["allow_atomic"] = True
        if self.discard_new_per_subject:
            body["discard_new_per_subject"] = True
        return body


class ConsumerSpec(Struct, frozen=True, kw_only=True):
    """Configuration of one durable pull consumer with explicit ack.

    `max_deliver` is -1 always: tries are counted from the delivery metadata before the item runs, since
    a message that JetStream gave up on stays in the stream unseen.
    """

    stream: str
    durable: str
    filter_subject: str
    ack_wait_s: float = 30.0
    max_ack_pending: int = 10_000
    deliver_policy: Literal["all", "last_per_subject"] = "all"

    def config(self) -> dict[str, Any]:
        """The `config` part of a `CONSUMER.CREATE` body."""
        return {
            "durable_name": self.durable,
            "name": self.durable,
            "filter_subject": self.filter_subject,
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s * 1e9),
            "max_deliver": -1,
            "max_ack_pending": self.max_ack_pending,
            "max_waiting": 512,
            "deliver_policy": self.deliver_policy,
            "replay_policy": "instant",
        }


def bucket(name: str, description: str, *, max_age_s: float = 0.0, allow_atomic: bool = False) -> StreamSpec:
    """A key-value bucket as JetStream keeps it: one value a key; new values replace old ones."""
    return StreamSpec(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        retention="limits",
        discard="new",
        max_msgs_per_subject=1,
        max_age=int(max_age_s * 1e9),
        allow_atomic=allow_atomic,
        allow_direct=True,
        deny_delete=True,
        allow_rollup_hdrs=True,
        description=description,
    )
