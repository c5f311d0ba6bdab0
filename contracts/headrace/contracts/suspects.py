"""What went wrong with tasks that will be delivered again: records that workers share.

They lie in a key-value bucket (`topology.suspects_bucket`), under the task's sequence in the stream of tasks, or
under `incident-<id>`. They expire, and nothing is lost with them but a second crash or the text of an error.
"""

from __future__ import annotations

from msgspec import Struct

from headrace.contracts.names import Count, Micros, ShortText, Token


class Suspect(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="suspect"):
    """A task that was inside an engine, or a worker's process, when that died; or whose last try raised.

    `crashes` 0: it only raised, `error` is what, and it is nobody's suspect. `alone`: nothing else was in the engine
    at the last crash. `stored_us` is the time at which its stream stored the task: with the sequence it names the
    task for certain, since a broker that lost its disk's last writes gives sequences anew.
    """

    stored_us: Micros
    crashes: Count = 0
    alone: bool = False
    incident: Token = "none"
    """The last crash: all that were in it share the name."""
    before: Token = "none"
    """The crash before that one."""
    error: ShortText = ""
    worker: Token = "unknown"
    started_us: Micros = 0
    """When it went into the engine that died: who came last is tried first."""
    at_us: Micros = 0


class Cleared(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cleared"):
    """An incident whose culprit is known: the others that were in it run as any other item."""

    incident: Token
    culprit: Count
    """The culprit's sequence in the stream of tasks."""
    worker: Token = "unknown"
    at_us: Micros = 0


SuspectRecord = Suspect | Cleared
