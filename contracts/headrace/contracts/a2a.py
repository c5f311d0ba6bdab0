"""Messages, tasks and artifacts as A2A 1.0's JSON has them, and what of ours they are.

A mail is a message, a prompt at the front door is a task, and its answer is the task's one artifact. A binding to HTTP
or JSON-RPC has no more to do than to carry these. Names are the specification's (camelCase, `ROLE_USER`,
`TASK_STATE_WORKING`); its fields that have no meaning here stand in `docs/agents.md`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.contracts.agents import AgentAnswer
from headrace.contracts.errors import HeadraceError, InvalidInput
from headrace.contracts.mail import Mail

Role = Literal["ROLE_USER", "ROLE_AGENT"]
TaskState = Literal[
    "TASK_STATE_SUBMITTED",
    "TASK_STATE_WORKING",
    "TASK_STATE_COMPLETED",
    "TASK_STATE_FAILED",
    "TASK_STATE_CANCELED",
    "TASK_STATE_REJECTED",
]
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_REJECTED = frozenset({"mailbox_full", "too_large", "unknown_kind", "undecodable"})


class Part(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One piece of content: exactly one of `text`, `raw` (base64 in JSON), `url` and `data`."""

    text: str | None = None
    raw: bytes | None = None
    url: str | None = None
    data: Any | UnsetType = UNSET
    metadata: dict[str, Any] | None = None
    filename: str | None = None
    media_type: str | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.text, self.raw, self.url) if v is not None]
        if len(given) + (self.data is not UNSET) != 1:
            msg = "a part has exactly one of text, raw, url and data"
            raise ValueError(msg)


Parts = Annotated[list[Part], Meta(min_length=1)]


class Message(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One unit of communication."""

    message_id: _Id
    role: Role
    parts: Parts
    context_id: _Id | None = None
    task_id: _Id | None = None
    metadata: dict[str, Any] | None = None
    extensions: list[str] = []
    reference_task_ids: list[str] = []


class Artifact(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a task put out."""

    artifact_id: _Id
    parts: Parts
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None


class TaskStatus(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where a task stands; `timestamp` is RFC 3339."""

    state: TaskState
    message: Message | None = None
    timestamp: str | None = None


class A2ATask(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A prompt at the front door, seen as a task: its id is the request's."""

    id: _Id
    status: TaskStatus
    context_id: _Id | None = None
    artifacts: list[Artifact] = []
    metadata: dict[str, Any] | None = None


def parts_of(body: bytes) -> tuple[list[Part], dict[str, Any] | None]:
    """A mail's body as parts and metadata: those that it has, the text of `{"prompt": …}`, or the whole as data.

    >>> parts_of(b'{"prompt": "hi"}')[0][0].text, parts_of(b"[1]")[0][0].data
    ('hi', [1])
    """
    value: Any = msgspec.json.decode(body)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if "parts" in fields:
            try:
                parts = msgspec.convert(fields["parts"], Parts)
                metadata = msgspec.convert(fields.get("metadata"), dict[str, Any] | None)
            except (msgspec.ValidationError, ValueError):
                pass  # it is called so and is something else: all of it is data
            else:
                return parts, metadata
        if list(fields) == ["prompt"] and isinstance(fields["prompt"], str):
            return [Part(text=fields["prompt"])], None
    if isinstance(value, str):
        return [Part(text=value)], None
    return [Part(data=cast("Any", value))], None


def body_of(message: Message) -> Raw:
    """The body of the mail that carries a message: the inverse of `parts_of`, where it is one text or one value."""
    only = message.parts[0] if len(message.parts) == 1 and message.metadata is None else None
    plain = only is not None and only.metadata is None and only.filename is None and only.media_type is None
    if only is not None and plain and only.text is not None:
        return Raw(msgspec.json.encode({"prompt": only.text}))
    if only is not None and plain and only.data is not UNSET:
        return Raw(msgspec.json.encode(only.data))
    whole: dict[str, Any] = {"parts": message.parts}
    return Raw(
        msgspec.json.encode(whole if message.metadata is None else whole | {"metadata": message.metadata})
    )


def message_of(mail: Mail, role: Role = "ROLE_USER") -> Message:
    """A mail as a message; an agent's answer is `ROLE_AGENT`."""
    parts, metadata = parts_of(bytes(mail.body))
    return Message(
        message_id=mail.id,
        role=role,
        parts=parts,
        context_id=mail.conversation,
        task_id=mail.task or mail.request,
        metadata=metadata,
    )


def task_of(answer: AgentAnswer, *, at_us: int | None = None) -> A2ATask:
    """What the front door says of a request, as a task."""
    done = answer.state == "answered"
    state: TaskState = "TASK_STATE_COMPLETED" if done else "TASK_STATE_WORKING"
    artifacts: list[Artifact] = []
    if done:
        parts, metadata = parts_of(bytes(answer.answer))
        artifacts = [Artifact(artifact_id=f"{answer.request}-answer", parts=parts, metadata=metadata)]
    return A2ATask(
        id=answer.request,
        context_id=answer.conversation,
        status=TaskStatus(state=state, timestamp=_time(at_us)),
        artifacts=artifacts,
        metadata={"agent": answer.agent},
    )


def failed_task_of(request: str, error: HeadraceError, *, at_us: int | None = None) -> A2ATask:
    """An error of the front door as the task that ended by it: refused, cancelled, or failed."""
    refused = error.code in _REJECTED or isinstance(error, InvalidInput)
    state: TaskState = "TASK_STATE_REJECTED" if refused else "TASK_STATE_FAILED"
    if error.code == "cancelled":
        state = "TASK_STATE_CANCELED"
    said = Message(
        message_id=f"{request}-error", role="ROLE_AGENT", parts=[Part(text=str(error) or error.code)]
    )
    return A2ATask(id=request, status=TaskStatus(state=state, message=said, timestamp=_time(at_us)))


def _time(micros: int | None) -> str | None:
    if micros is None:
        return None
    return datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
