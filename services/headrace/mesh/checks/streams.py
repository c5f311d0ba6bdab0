"""Every stream of the mesh against its specification: limits that lose or refuse work first, then what else differs."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.contracts.api import Finding
from headrace.contracts.specs import StreamSpec
from headrace.mesh.checks import stream_rules
from headrace.mesh.checks.findings import Unread, attempt, fail, ok, some, warn
from headrace.mesh.checks.reading import Info, Reading
from headrace.mesh.checks.server import NEARLY_FULL
from headrace.mesh.provision import differences

INIT: Final = "headrace init"


async def check_streams(reading: Reading) -> list[Finding]:
    """The findings of all streams, in the order of the topology."""
    found: list[Finding] = []
    specs = reading.mesh.topology.streams()
    infos = await asyncio.gather(*(attempt(reading.stream(spec.name)) for spec in specs))
    for spec, info in zip(specs, infos, strict=True):
        check = f"stream {spec.name}"
        if isinstance(info, Unread):
            found.append(info.finding(check))
        elif info is None:
            found.append(fail(check, "missing", INIT))
        else:
            found += stream_findings(spec, info)
    return found


def stream_findings(spec: StreamSpec, info: Info) -> list[Finding]:
    """What is wrong with one stream; one finding that says ok if nothing is."""
    check, config = f"stream {spec.name}", info["config"]
    broken = stream_rules.broken_rules(spec, config)
    found = [stream_rules.describe(rule, spec, config) for rule in broken]
    told = {rule.setting for rule in broken}
    if "sealed" in told:
        told |= {"deny_delete", "deny_purge"}  # sealing sets them
        found = [f for f in found if not f.found.startswith("deny_")]
    wanted = {key: value for key, value in spec.config().items() if key not in told}
    drift = [line.removeprefix(f"{check}: ") for line in differences(check, wanted, config)]
    if drift:
        mend = f"set it so (`nats stream edit {spec.name}`), or remake the stream: {INIT}"
        found.append(fail(check, "; ".join(drift), mend))
    if unknown := stream_rules.unknown_settings(spec, config):
        mend = f"if you did not choose it, unset it (`nats stream edit {spec.name}`)"
        found.append(warn(check, f"unknown here: {some(unknown)}", mend))
    state, bound = info["state"], int(config.get("max_bytes", -1))
    if bound > 0 and int(state["bytes"]) >= NEARLY_FULL * bound:
        text = f"{int(state['bytes']):,} of {bound:,} bytes (max_bytes): a full stream refuses work"
        mend = f"let workers work it off, or raise max_bytes (`nats stream edit {spec.name} --max-bytes N`)"
        found.append(warn(check, text, mend))
    return found or [ok(check, f"{int(state['messages']):,} messages")]


def stopping(spec: StreamSpec, info: Info) -> list[Finding]:
    """The findings of one stream for which no service starts on it: work is lost there, or goes astray."""
    config = info["config"]
    broken = stream_rules.broken_rules(spec, config)
    return [stream_rules.describe(rule, spec, config) for rule in broken if rule.stops]
