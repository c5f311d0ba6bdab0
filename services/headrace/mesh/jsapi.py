"""JetStream's API by raw requests: what a stream holds, its last message of a subject, purges.

nats-py's own management calls rewrite silently and map errors by HTTP-like codes; here every error
keeps its `err_code`, which is what callers branch on.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import Struct

from headrace.contracts.errors import HeadraceError, NotFound, Unavailable
from headrace.mesh.connection import Mesh

WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SUBJECT_SEQUENCE = 10164
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
NO_MESSAGE = 10037
STREAM_EXISTS = 10058
CONSUMER_EXISTS = (10148, 10013)
STREAM_STORE_FAILED = 10077
RESOURCES_EXCEEDED = 10023
_DIRECT_HEADERS = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending")
STREAM_IS_FULL = (STREAM_STORE_FAILED, RESOURCES_EXCEEDED, 10047)
"""Limits of the stream or of the server (10047: storage) refuse the message; what was stored stays."""


class JetStreamError(HeadraceError):
    """A refusal by the broker. `err_code` is JetStream's own number."""

    code = "broker_refused"

    def __init__(self, description: str, *, status: int, err_code: int) -> None:
        super().__init__(f"{description} (JetStream error {err_code})")
        self.status = status
        self.err_code = err_code
        self.description = description


def check(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` unless it is an error."""
    error = body.get("error")
    if error:
        description, err_code = str(error.get("description", "refused")), int(error.get("err_code", 0))
        raise JetStreamError(description, status=int(error.get("code", 500)), err_code=err_code)
    return body


async def call(mesh: Mesh, operation: str, body: object = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """One request of JetStream's API, `operation` without the prefix `$JS.API.`"""
    data = msgspec.json.encode(body) if body is not None else b""
    answer = await mesh.request(f"$JS.API.{operation}", data, timeout_s=timeout_s)
    return check(msgspec.json.decode(answer.data))


async def stream_info(mesh: Mesh, stream: str, *, subjects_filter: str | None = None) -> dict[str, Any]:
    """Configuration and state of a stream; with a filter also `state.subjects`, a count for each subject."""
    if subjects_filter is None:
        return await _found(call(mesh, f"STREAM.INFO.{stream}"), f"stream {stream}")
    subjects: dict[str, int] = {}
    offset = 0
    while True:  # the server pages at 100,000 subjects
        body = {"subjects_filter": subjects_filter, "offset": offset}
        info = await _found(call(mesh, f"STREAM.INFO.{stream}", body), f"stream {stream}")
        page: dict[str, int] = info["state"].get("subjects") or {}
        subjects.update(page)
        offset += len(page)
        if not page or offset >= int(info.get("total", 0)):
            info["state"]["subjects"] = subjects
            return info


async def count_subject(mesh: Mesh, stream: str, filter_: str) -> int:
    """How many messages of `stream` match the subject filter, leased ones included."""
    info = await stream_info(mesh, stream, subjects_filter=filter_)
    return sum(info["state"]["subjects"].values())


class StoredMessage(Struct, frozen=True, kw_only=True):
    """A message as the stream keeps it."""

    subject: str
    sequence: int
    data: bytes
    headers: dict[str, str]


async def last_message(mesh: Mesh, stream: str, subject: str) -> StoredMessage | None:
    """The newest message of `subject`, or None.

    A user who may not read the whole stream may be let read some of its subjects, by `DIRECT.GET`. On replicas that may
    be a moment behind, which a compare-and-set finds out.
    """
    if stream not in mesh.read_by_subject:
        try:
            return await _message(mesh, stream, {"last_by_subj": subject})
        except Unavailable as e:
            if e.code != "denied":
                raise
        mesh.read_by_subject.add(stream)
    return await _direct(mesh, stream, subject)


async def _direct(mesh: Mesh, stream: str, subject: str) -> StoredMessage | None:
    answer = await mesh.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
    headers = dict(answer.headers or {})
    if headers.get("Status") == "404":
        return None
    if "Nats-Sequence" not in headers:
        raise Unavailable(
            f"{subject} of {stream} cannot be read: {headers.get('Description', 'no reason given')[:200]}"
        )
    own = {k: v for k, v in headers.items() if k not in _DIRECT_HEADERS}
    return StoredMessage(
        subject=headers["Nats-Subject"], sequence=int(headers["Nats-Sequence"]), data=answer.data, headers=own
    )


async def get_message(mesh: Mesh, stream: str, sequence: int) -> StoredMessage | None:
    """The message with that stream sequence, or None."""
    return await _message(mesh, stream, {"seq": sequence})


async def next_message(mesh: Mesh, stream: str, subject: str, from_sequence: int) -> StoredMessage | None:
    """The first message of `subject` (a filter) at or after `from_sequence`, or None."""
    return await _message(mesh, stream, {"seq": from_sequence, "next_by_subj": subject})


async def _message(mesh: Mesh, stream: str, body: dict[str, Any]) -> StoredMessage | None:
    try:
        found = (await call(mesh, f"STREAM.MSG.GET.{stream}", body))["message"]
    except JetStreamError as e:
        if e.err_code == NO_MESSAGE:
            return None
        raise
    block = base64.b64decode(found["hdrs"]).decode("utf-8", "replace") if found.get("hdrs") else ""
    headers = dict(line.split(": ", 1) for line in block.split("\r\n")[1:] if ": " in line)
    return StoredMessage(
        subject=found["subject"],
        sequence=int(found["seq"]),
        data=base64.b64decode(found.get("data") or ""),
        headers=headers,
    )


async def purge(mesh: Mesh, stream: str, *, filter_: str, keep: int = 0) -> int:
    """Remove the messages that match `filter_`, waiting and leased, but the newest `keep`; return how many."""
    body: dict[str, Any] = {"filter": filter_}
    if keep:
        body["keep"] = keep
    return int((await call(mesh, f"STREAM.PURGE.{stream}", body, timeout_s=30.0)).get("purged", 0))


async def delete_message(mesh: Mesh, stream: str, sequence: int) -> None:
    """Remove one message by its stream sequence."""
    await call(mesh, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})


async def consumer_info(mesh: Mesh, stream: str, durable: str) -> dict[str, Any]:
    """Configuration and state of a durable consumer."""
    return await _found(call(mesh, f"CONSUMER.INFO.{stream}.{durable}"), f"consumer {stream}/{durable}")


async def account_info(mesh: Mesh) -> dict[str, Any]:
    """Limits and usage of the account, `NotFound` if JetStream is off."""
    return await call(mesh, "INFO")


async def _found(request: Any, what: str) -> dict[str, Any]:
    try:
        return await request
    except JetStreamError as e:
        if e.err_code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
            msg = f"{what} does not exist: run `headrace init`"
            raise NotFound(msg) from None
        raise
