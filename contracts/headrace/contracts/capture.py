"""What agents did, as it travels on `hr.capture.<agent>.<run>`: records, and the counts that account for them.

A run is a conversation: the id that follows messages from agent to agent, so that all that came of one question can be
read back in order. A life is one life of an agent's process; `seq` numbers what it recorded, from 1 without a gap, what
it had to drop included. So (agent, life, seq) names a record, a number that is missing was dropped, and
`recorded = captured + dropped + waiting` holds in each count.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Annotated

from msgspec import Meta, Raw, Struct

from headrace.contracts.names import TOKEN_PATTERN, Count, Micros, Token

MAX_RECORDS = 1_000
"""Records of one message."""

Named = Annotated[str, Meta(max_length=256)]
Seq = Annotated[int, Meta(ge=1, lt=2**53)]


class CaptureRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that an agent did. `kind` says what: `handled`, `failed`, `sent`, `called`, `tool`, `note`, …

    `name` is the message's kind, the callee, the tool, or what the agent called its note; `peer` the other agent;
    `message` the id of the message that was handled meanwhile, `hop` its distance from the first of its conversation.
    """

    seq: Seq
    at_us: Micros
    kind: Token
    name: Named | None = None
    message: Named | None = None
    peer: Named | None = None
    hop: Annotated[int, Meta(ge=0, le=10_000)] = 0
    data: Raw = Raw(b"null")
    """JSON, as the agent gave it, with what `policy.redact` matches replaced."""


class CaptureRecords(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="records"):
    """Records of one agent's life in one run, in the order of their numbers."""

    agent: Token
    run: Token
    life: Token
    records: Annotated[list[CaptureRecord], Meta(min_length=1, max_length=MAX_RECORDS)]
    tenant: Token = "default"
    trace_id: Annotated[str, Meta(max_length=32)] | None = None


class CaptureCount(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="count"):
    """How much one life of an agent has recorded: `captured` is stored, `waiting` not yet, `dropped` never will be.

    The newest count of a life, the one with the largest `number`, is the one that holds. `final` is the last: nothing
    waits any more. A life without a final one was killed, and what waited in it is lost, uncounted.
    """

    agent: Token
    life: Token
    number: Seq
    at_us: Micros
    recorded: Count
    captured: Count
    dropped: Count
    waiting: Count = 0
    final: bool = False
    tenant: Token = "default"


CaptureMessage = CaptureRecords | CaptureCount

_TOKEN = re.compile(TOKEN_PATTERN)


def run_token(conversation: str) -> str:
    """The run of a conversation as its subject names it: its own id where that is a token, else its digest.

    >>> run_token("0197-a")
    '0197-a'
    """
    if _TOKEN.match(conversation):
        return conversation
    digest = hashlib.sha256(conversation.encode("utf-8", "replace")).digest()
    return base64.b32encode(digest).decode().lower()[:26]
