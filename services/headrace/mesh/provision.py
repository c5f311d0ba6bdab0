"""Streams, buckets, consumers and functions, made once and compared for ever after.

Creation is by raw requests with `action: create`: JetStream's create-or-update would rewrite settings
silently. What exists and differs is a `Conflict` that prints the difference; nothing is changed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.contracts import codec
from headrace.contracts.errors import Conflict, NotFound
from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import check_token
from headrace.contracts.specs import ConsumerSpec, StreamSpec
from headrace.mesh.checks import consumer_rules, stream_rules
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import (
    CONSUMER_EXISTS,
    CONSUMER_NOT_FOUND,
    STREAM_EXISTS,
    STREAM_NOT_FOUND,
    JetStreamError,
    call,
    count_subject,
    last_message,
    stream_info,
)
from headrace.mesh.publisher import publish

_TUNABLE = {"max_bytes", "num_replicas", "description", "duplicate_window", "max_waiting", "max_ack_pending"}
"""Settings that an operator may change without us minding: they cannot lose what was stored (`headrace doctor` says
where they are too small)."""


async def provision(mesh: Mesh, *, dry_run: bool = False) -> list[str]:
    """Make what is missing of the task path; return what was (or would be) made, one line each.

    Raise `Conflict` with every difference if something exists otherwise.
    """
    made: list[str] = []
    drift: list[str] = []
    for stream in mesh.topology.streams():
        existing = await _existing(call(mesh, f"STREAM.INFO.{stream.name}"), STREAM_NOT_FOUND)
        if existing is None:
            made.append(f"stream {stream.name} ({', '.join(stream.subjects)})")
            if not dry_run:
                await _create_stream(mesh, stream)
        else:
            drift += differences(f"stream {stream.name}", stream.config(), existing)
            drift += stream_rules.forbidden(stream, existing)
    if not drift:
        for consumer in [*mesh.topology.completion_consumers(), *mesh.topology.gateway_consumers()]:
            made += await _ensure_consumer(mesh, consumer, drift, dry_run=dry_run)
    _refuse(drift)
    return made


async def _create_stream(mesh: Mesh, spec: StreamSpec) -> None:
    try:
        await call(
            mesh, f"STREAM.CREATE.{spec.name}", spec.config(replicas=mesh.settings.replicas), timeout_s=10
        )
    except JetStreamError as e:
        if e.err_code != STREAM_EXISTS:
            raise  # STREAM_EXISTS: another process made it a moment ago


async def _existing(request: Any, absent: int) -> dict[str, Any] | None:
    try:
        return (await request)["config"]
    except JetStreamError as e:
        if e.err_code == absent:
            return None
        raise


async def _ensure_consumer(mesh: Mesh, spec: ConsumerSpec, drift: list[str], *, dry_run: bool) -> list[str]:
    name = f"consumer {spec.stream}/{spec.durable}"
    existing = await _existing(call(mesh, f"CONSUMER.INFO.{spec.stream}.{spec.durable}"), CONSUMER_NOT_FOUND) \
        if not (dry_run and not await _stream_exists(mesh, spec.stream)) else None  # fmt: skip
    if existing is not None:
        drift += differences(name, spec.config(), existing) + consumer_rules.forbidden(spec, existing)
        return []
    if not dry_run:
        await create_consumer(mesh, spec)
    return [f"{name} ({spec.filter_subject})"]


async def _stream_exists(mesh: Mesh, stream: str) -> bool:
    return await _existing(call(mesh, f"STREAM.INFO.{stream}"), STREAM_NOT_FOUND) is not None


async def create_consumer(mesh: Mesh, spec: ConsumerSpec) -> None:
    """Make a durable pull consumer; one that exists with the same settings is fine, another is a `Conflict`."""
    body = {"stream_name": spec.stream, "config": spec.config(), "action": "create"}
    try:
        await call(
            mesh, f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}", body, timeout_s=10
        )
    except JetStreamError as e:
        if e.err_code not in CONSUMER_EXISTS:
            raise
        info = await call(mesh, f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        _refuse(
            differences(f"consumer {spec.stream}/{spec.durable}", spec.config(), info["config"])
            + consumer_rules.forbidden(spec, info["config"])
        )


def differences(what: str, wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each setting of `wanted` that `found` has otherwise (absent means JetStream's zero)."""
    lines: list[str] = []
    for key, want in wanted.items():
        have = found.get(key)
        if have is None and want in (False, 0, "", None):
            continue
        if key not in _TUNABLE and have != want:
            lines.append(f"{what}: {key} is {have!r}, should be {want!r}")
    return lines


def _refuse(drift: list[str]) -> None:
    if drift:
        msg = (
            "what exists differs from what Headrace needs; nothing was changed. Mend or remove it:\n  "
            + "\n  ".join(drift)
        )
        raise Conflict(msg, code="drift")


# --- functions --------------------------------------------------------------------------------------


async def register_function(mesh: Mesh, spec: FunctionSpec) -> None:
    """Register `spec` and make its consumers; idempotent. Another spec under the name is a `Conflict`."""
    key = f"$KV.{mesh.topology.functions_bucket}.{spec.name}"
    stream = f"KV_{mesh.topology.functions_bucket}"
    stored = await last_message(mesh, stream, key)
    if stored is None or not stored.data:
        try:
            await publish(
                mesh,
                stream,
                key,
                codec.FUNCTION.encode(spec),
                expected_last_subject_seq=stored.sequence if stored else 0,
            )
        except JetStreamError:
            stored = await last_message(mesh, stream, key)  # another worker registered it a moment ago
            if stored is None:
                raise
    if stored is not None and stored.data:
        known = codec.FUNCTION.decode(stored.data)
        _refuse(
            [
                f"function {spec.name}: {field} is {getattr(known, field)!r}, this one has {getattr(spec, field)!r}"
                for field in FunctionSpec.__struct_fields__
                if getattr(known, field) != getattr(spec, field)
            ]
        )
    drift: list[str] = []
    for consumer in mesh.topology.function_consumers(spec):
        await _ensure_consumer(mesh, consumer, drift, dry_run=False)
    _refuse(drift)


async def update_function(mesh: Mesh, spec: FunctionSpec) -> FunctionSpec:
    """Put `spec` in the place of the registered one, and return what is registered then: somebody else's, if they were
    faster. The consumers must be the same: raise `Conflict` if they are not.
    """
    key = f"$KV.{mesh.topology.functions_bucket}.{spec.name}"
    stream = f"KV_{mesh.topology.functions_bucket}"
    stored = await last_message(mesh, stream, key)
    if stored is None or not stored.data:
        await register_function(mesh, spec)
        return spec
    known = codec.FUNCTION.decode(stored.data)
    if (known.lanes, known.shapes()) != (spec.lanes, spec.shapes()):
        msg = f"function {spec.name!r} is registered with other lanes or shapes: headrace init --unregister {spec.name}"
        raise Conflict(msg, code="other_function")
    try:
        data = codec.FUNCTION.encode(spec)
        await publish(mesh, stream, key, data, expected_last_subject_seq=stored.sequence)
    except JetStreamError:
        return await get_function(mesh, spec.name)
    return spec


async def unregister_function(mesh: Mesh, name: str) -> None:
    """Forget a function and its consumers, so that the name can be registered for another model.

    Raise `NotFound`, or `Conflict` while tasks wait for it: they were made for the model that it names.
    """
    spec = await get_function(mesh, name)
    waiting = await count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_function(name))
    if waiting:
        msg = (
            f"{waiting} tasks wait for function {name!r} ({spec.engine} {spec.model}): let a worker of that model "
            "finish them, or cancel their jobs, before the name is registered anew"
        )
        raise Conflict(msg, code="tasks_waiting")
    bucket = mesh.topology.functions_bucket
    deleted = {"KV-Operation": "DEL"}
    await publish(mesh, f"KV_{bucket}", f"$KV.{bucket}.{name}", b"", headers=deleted)
    for consumer in mesh.topology.function_consumers(spec):
        try:
            await call(mesh, f"CONSUMER.DELETE.{consumer.stream}.{consumer.durable}")
        except JetStreamError as e:
            if e.err_code != CONSUMER_NOT_FOUND:
                raise


async def get_function(mesh: Mesh, name: str) -> FunctionSpec:
    """The registered function; `NotFound` naming the known ones."""
    check_token("function", name)
    bucket = mesh.topology.functions_bucket
    stored = await last_message(mesh, f"KV_{bucket}", f"$KV.{bucket}.{name}")
    if stored is None or not stored.data:
        known = ", ".join(f.name for f in await list_functions(mesh)) or "none yet: start a worker"
        msg = f"function {name!r} is not registered; known: {known}"
        raise NotFound(msg, code="unknown_function")
    return codec.FUNCTION.decode(stored.data)


async def list_functions(mesh: Mesh) -> list[FunctionSpec]:
    """Every registered function, by name."""
    bucket = mesh.topology.functions_bucket
    info = await stream_info(mesh, f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.>")
    found: list[FunctionSpec] = []
    for subject in sorted(info["state"]["subjects"]):
        stored = await last_message(mesh, f"KV_{bucket}", subject)
        if stored is not None and stored.data:
            found.append(msgspec.convert(codec.FUNCTION.decode(stored.data), FunctionSpec))
    return found
