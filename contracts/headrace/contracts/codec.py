"""Bytes and headers: one encoder, one decoder for each message, one schema header.

Every message travels as JSON with `Headrace-Schema: <message>/<version>`. A missing header is taken as
the expected schema (people publish by hand); a different one is `Undecodable`, and so are bytes that do
not fit the Struct. Error texts name the field and never quote the payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from headrace.contracts import agents, calls, capture, ledger, mail, pipeline, suspects
from headrace.contracts import messages as m
from headrace.contracts.errors import Undecodable

SCHEMA_HEADER: Final = "Headrace-Schema"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
REDRIVEN: Final = "Headrace-Redriven"
"""Of a mail that an operator sent once more from the dead letters: later mails of its sender went by meanwhile."""

T = TypeVar("T")
_encoder = msgspec.json.Encoder(order="deterministic")
_fast_encoder = msgspec.json.Encoder()


class Schema(Generic[T]):
    """Codec of one message: its schema name, and `encode`/`decode` in both directions."""

    __slots__ = ("_decode", "name", "type")

    def __init__(self, name: str, type_: Any) -> None:
        self.name = name
        self.type = type_
        self._decode = msgspec.json.Decoder(type_).decode

    def encode(self, message: T) -> bytes:
        """JSON of `message`, compact, fields in the order of the Struct."""
        return _fast_encoder.encode(message)

    def decode(self, data: bytes, headers: Mapping[str, str] | None = None) -> T:
        """The message in `data`; raise `Undecodable` if header or bytes do not fit."""
        if headers:
            named = headers.get(SCHEMA_HEADER)
            if named is not None and named != self.name:
                msg = f"schema {named[:80]!r} where {self.name!r} is expected"
                raise Undecodable(msg)
        try:
            if not data.isascii():
                data.decode("utf-8")  # a `Raw` field is skipped by the decoder, bad bytes and all
            return self._decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            # UnicodeDecodeError is a ValueError whose text quotes bytes; the others name only the field.
            why = "not UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)[:300]
            msg = f"not a {self.name}: {why}"
            raise Undecodable(msg) from None


TASK: Final = Schema[m.Task]("task/1", m.Task)
RESULT: Final = Schema[m.Result]("result/1", m.Result)
MANIFEST: Final = Schema[m.Manifest]("manifest/1", m.Manifest)
JOB_EVENT: Final = Schema[m.JobEvent]("job-event/1", m.JobEvent)
DEAD_LETTER: Final = Schema[m.DeadLetter]("dead-letter/1", m.DeadLetter)
FUNCTION: Final = Schema[m.FunctionSpec]("function/1", m.FunctionSpec)
WORKER_REPORT: Final = Schema[m.WorkerReport]("worker-report/1", m.WorkerReport)
SUSPECT: Final = Schema[suspects.SuspectRecord]("suspect/1", suspects.SuspectRecord)
CALL_RECORD: Final = Schema[ledger.CallRecord]("call-record/1", ledger.CallRecord)
BUDGET_HEAD: Final = Schema[ledger.BudgetHead]("budget-head/1", ledger.BudgetHead)
ROSTER: Final = Schema[ledger.Roster]("roster/1", ledger.Roster)
EVIDENCE: Final = Schema[ledger.Evidence]("evidence/1", ledger.Evidence)
CALL: Final = Schema[calls.CallMessage]("call/1", calls.CallMessage)
PIPELINE: Final = Schema[pipeline.PipelineRecord]("pipeline/1", pipeline.PipelineRecord)
MAIL: Final = Schema[mail.Mail]("mail/1", mail.Mail)
AGENT_STATE: Final = Schema[mail.AgentState]("agent-state/1", mail.AgentState)
MAIL_REPLY: Final = Schema[mail.MailReply]("mail-reply/1", mail.MailReply)
AGENT_CARD: Final = Schema[agents.AgentCard]("agent-card/1", agents.AgentCard)
AGENT_PRESENCE: Final = Schema[agents.AgentPresence]("agent-presence/1", agents.AgentPresence)
ACCEPTED: Final = Schema[agents.Accepted]("accepted/1", agents.Accepted)
CAPTURE: Final = Schema[capture.CaptureMessage]("capture/1", capture.CaptureMessage)

PROMPT: Final = Schema[m.Prompt]("prompt/1", m.Prompt)
"""A prompt by itself, as an object holds it: no message, so it is not among `SCHEMAS`."""

SCHEMAS: Final[tuple[Schema[Any], ...]] = (
    TASK,
    RESULT,
    MANIFEST,
    JOB_EVENT,
    DEAD_LETTER,
    FUNCTION,
    WORKER_REPORT,
    SUSPECT,
    CALL,
    CALL_RECORD,
    BUDGET_HEAD,
    ROSTER,
    EVIDENCE,
    PIPELINE,
    MAIL,
    AGENT_STATE,
    MAIL_REPLY,
    AGENT_CARD,
    AGENT_PRESENCE,
    ACCEPTED,
    CAPTURE,
)


def fingerprint(value: Any) -> str:
    """Sixteen hex digits that are equal for equal values: sha256 of the canonical JSON (sorted keys)."""
    # Sorting takes string keys only, and `logit_bias` has integers.
    return hashlib.sha256(_encoder.encode(msgspec.to_builtins(value, str_keys=True))).hexdigest()[:16]
