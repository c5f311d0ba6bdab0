"""The mesh's durable consumers: there, as specified, not paused; and who else reads or takes the mesh's subjects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.contracts.api import Finding
from headrace.contracts.errors import InvalidInput
from headrace.contracts.specs import ConsumerSpec
from headrace.contracts.topology import Topology
from headrace.mesh.checks import consumer_rules
from headrace.mesh.checks.findings import Unread, attempt, fail, ok, some, warn
from headrace.mesh.checks.reading import Info, Reading
from headrace.mesh.provision import differences


async def check_consumers(reading: Reading) -> list[Finding]:
    """Completion's consumers and those of every registered function."""
    topology = reading.mesh.topology
    wanted = topology.completion_consumers() + topology.gateway_consumers()
    for function in await reading.functions():
        wanted += topology.function_consumers(function)
    found: list[Finding] = []
    missing: list[str] = []
    streams = list(dict.fromkeys(spec.stream for spec in wanted))
    lists = await asyncio.gather(*(attempt(reading.consumers(stream)) for stream in streams))
    for stream, present in zip(streams, lists, strict=True):
        if isinstance(present, Unread):
            found.append(present.finding(f"consumers of {stream}"))
            continue
        infos = {str(info["name"]): info for info in present}
        for spec in (spec for spec in wanted if spec.stream == stream):
            if spec.durable in infos:
                found += consumer_findings(spec, infos[spec.durable])
            else:
                missing.append(f"{stream}/{spec.durable}")
    if missing:
        mend = "headrace init; a worker makes those of its function"
        found.append(fail("consumers", f"missing: {some(missing)}", mend))
    return found or [ok("consumers", f"{len(wanted)} present")]


def consumer_findings(spec: ConsumerSpec, info: Info) -> list[Finding]:
    """What is wrong with one consumer; nothing if nothing is."""
    check, config = f"consumer {spec.stream}/{spec.durable}", info["config"]
    broken = consumer_rules.broken_rules(config)
    found = [consumer_rules.describe(rule, spec, config) for rule in broken]
    told = {rule.setting for rule in broken}
    if "backoff" in told:
        told.add("ack_wait")  # the broker sets it to the first step
    remake = consumer_rules.REMAKE.format(stream=spec.stream, consumer=spec.durable)
    wanted = {key: value for key, value in spec.config().items() if key not in told}
    if drift := differences(check, wanted, config):
        found.append(fail(check, "; ".join(d.removeprefix(f"{check}: ") for d in drift), remake))
    if info.get("paused"):
        text = f"paused until {config.get('pause_until', 'later')} (pause_until): nothing is delivered"
        found.append(fail(check, text, f"nats consumer resume {spec.stream} {spec.durable}"))
    if unknown := consumer_rules.unknown_settings(spec, config):
        found.append(warn(check, f"unknown here: {some(unknown)}", f"if you did not choose it: {remake}"))
    return found


async def check_strangers(reading: Reading) -> list[Finding]:
    """Streams and consumers that are not the mesh's and take its messages, or answer for its services."""
    return [*await _foreign_streams(reading), *await _foreign_consumers(reading)] or [ok("strangers", "none")]


async def _foreign_streams(reading: Reading) -> list[Finding]:
    mesh = reading.mesh
    ours = {spec.name for spec in mesh.topology.streams()}
    own = {subject for spec in mesh.topology.streams() for subject in spec.subjects}
    found: dict[str, Finding] = {}
    subjects = (f"{mesh.subjects.prefix}.api.>", *sorted(own))
    lists = await asyncio.gather(*(reading.streams_on(subject) for subject in subjects))
    for subject, names in zip(subjects, lists, strict=True):
        for name in names:
            if name not in ours and name not in found:
                what = (
                    "takes work in place of the mesh's stream"
                    if subject in own
                    else "answers requests in place of the services"
                )
                mend = (
                    f"take that subject from it (`nats stream edit {name}`), or give the mesh another prefix"
                )
                found[name] = fail("strangers", f"stream {name} has {subject}: it {what}", mend)
    return list(found.values())


async def _foreign_consumers(reading: Reading) -> list[Finding]:
    topology = reading.mesh.topology
    known = topology.completion_consumers() + topology.gateway_consumers()
    ours = {(spec.stream, spec.durable) for spec in known}
    found: list[Finding] = []
    for stream in (spec.name for spec in topology.streams() if spec.retention == "workqueue"):
        for info in await reading.consumers(stream):
            name, config = str(info["name"]), info["config"]
            if config.get("sourcing"):
                found.append(_copy(stream, info))
            elif (stream, name) not in ours and not is_ours(topology, stream, name, config):
                filters = config.get("filter_subjects") or [config.get("filter_subject") or "everything"]
                text = f"consumer {name} on {stream} takes {', '.join(filters)}: what it acks, nobody runs"
                found.append(fail("strangers", text, f"nats consumer rm {stream} {name}"))
    return found


def is_ours(topology: Topology, stream: str, name: str, config: Info) -> bool:
    """Whether a consumer is one of the mesh's own kinds, of a function that is no longer registered, say."""
    subject = str(config.get("filter_subject", ""))
    if stream == topology.results:
        return subject == topology.subjects.results_of_sink("call")
    try:
        # The filter of a shape ends in a wildcard where a task's subject has its job.
        address = topology.subjects.parse_task(subject.removesuffix(">") + "job")
    except InvalidInput:
        return False
    return name == topology.task_consumer(address.function, address.lane, address.shape).durable


def _copy(stream: str, info: Info) -> Finding:
    metadata: Info = info["config"].get("metadata") or {}
    names = [
        str(value) for key, value in metadata.items() if key.startswith("_nats.") and key.endswith(".stream")
    ]
    text = f"stream {', '.join(names) or info['name']} copies {stream}: it keeps what is long done"
    return warn(
        "strangers", text, "remove the copy, if that is not meant: work that is put back from it runs twice"
    )


# --- leases -----------------------------------------------------------------------------------------


def lease_findings(check: str, consumers: Sequence[Info], wanted: int, why: str) -> list[Finding]:
    """Consumers whose `max_ack_pending` is below `wanted`: what is leased never exceeds it, however many wait."""
    low = [info for info in consumers if 0 < int(info["config"].get("max_ack_pending") or 0) < wanted]
    if not low:
        return []
    texts = [
        f"{info['stream_name']}/{info['name']} leases {info['config']['max_ack_pending']:,} at most"
        for info in low
    ]
    edits = [
        f"nats consumer edit {info['stream_name']} {info['name']} --max-pending {wanted}" for info in low
    ]
    return [
        warn(
            check, f"max_ack_pending: {some(texts)}; {why}", f"set max_ack_pending: {wanted} ({some(edits)})"
        )
    ]
