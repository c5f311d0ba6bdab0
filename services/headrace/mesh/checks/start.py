"""What each service checks of its own part before it takes work: it refuses to start, or logs a line for each risk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from headrace.contracts.api import Finding
from headrace.contracts.errors import Conflict, HeadraceError, NotFound, Unavailable
from headrace.contracts.specs import ConsumerSpec, StreamSpec
from headrace.mesh.checks.backlog import wanted_leases
from headrace.mesh.checks.consumers import lease_findings
from headrace.mesh.checks.findings import Unread, attempt
from headrace.mesh.checks.host import check_files
from headrace.mesh.checks.reading import Info, Reading
from headrace.mesh.checks.server import check_clock, check_version, is_off
from headrace.mesh.checks.streams import stopping, stream_findings
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import JetStreamError, consumer_info

log = logging.getLogger("headrace.checks")


async def check_start(mesh: Mesh, streams: Collection[str]) -> None:
    """Raise the one reason for which this service cannot work on `streams`, and log what it can work with.

    `Unavailable` (`server_too_old`, `jetstream_off`), `NotFound` (`streams_missing`), `Conflict` (`loses_work`). What
    this user may not read is passed over: a worker needs no right to look at streams.
    """
    version = check_version(mesh)
    if version.state == "fail":
        raise Unavailable(f"the broker is version {version.found}: {version.mend}", code="server_too_old")
    reading = Reading(mesh)
    try:
        account = await attempt(reading.account())
    except JetStreamError as e:
        account = e
    error = account.error if isinstance(account, Unread) else account
    if isinstance(error, HeadraceError) and is_off(error):
        msg = "JetStream is off on this broker, or for this account: turn it on in the server's configuration"
        raise Unavailable(msg, code="jetstream_off")
    found: list[Finding] = [check_files("open files")]
    for spec, info in await _sound_streams(reading, streams):
        found += stream_findings(spec, info)
    clock = await attempt(check_clock(mesh))
    log_findings([*found, *(clock if isinstance(clock, list) else [])])


async def refuse_loss(mesh: Mesh, streams: Collection[str]) -> None:
    """Raise `NotFound` or `Conflict`, as `check_start` does, if what is stored in `streams` now would not be kept."""
    await _sound_streams(Reading(mesh), streams)


async def _sound_streams(reading: Reading, streams: Collection[str]) -> list[tuple[StreamSpec, Info]]:
    specs = [spec for spec in reading.mesh.topology.streams() if spec.name in streams]
    infos = await asyncio.gather(*(attempt(reading.stream(spec.name)) for spec in specs))
    missing = [spec.name for spec, info in zip(specs, infos, strict=True) if info is None]
    if missing:
        msg = f"the broker has no {', '.join(missing)}: run `headrace init`"
        raise NotFound(msg, code="streams_missing")
    sound: list[tuple[StreamSpec, Info]] = []
    for spec, info in zip(specs, infos, strict=True):
        if isinstance(info, Unread) or info is None:
            log.info("not checked", extra={"check": f"stream {spec.name}", "reason": "it cannot be read"})
        elif stops := stopping(spec, info):
            texts = [f"{f.check}: {f.found}. {f.mend[0].upper()}{f.mend[1:]}" for f in stops]
            raise Conflict("work would be lost here. " + "; ".join(texts), code="loses_work")
        else:
            sound.append((spec, info))
    return sound


async def check_leases(mesh: Mesh, specs: Sequence[ConsumerSpec], held: int, worker: str) -> None:
    """Log which of a function's consumers allow fewer leases than its workers hold; this one holds `held` items."""
    reading, function = Reading(mesh), specs[0].durable.rsplit("-", 2)[0] if specs else ""
    try:
        infos: list[Info] = [await consumer_info(mesh, spec.stream, spec.durable) for spec in specs]
        others = [r for r in await reading.reports() if r.function == function and r.worker != worker]
    except HeadraceError as e:
        log.info("not checked", extra={"check": f"leases of {function}", "reason": str(e)[:200]})
        return
    holds = [held, *(max(r.slots, r.in_flight) for r in others if r.state != "draining")]
    wanted = wanted_leases(holds)
    why = f"{len(holds)} workers hold {sum(holds):,}, and need {wanted:,}"
    log_findings(lease_findings(f"leases of {function}", infos, wanted, why))


def log_findings(findings: Sequence[Finding]) -> None:
    """One line for each finding that is not ok."""
    for finding in findings:
        if finding.state != "ok":
            log.warning(
                "not as it should be",
                extra={"check": finding.check, "found": finding.found, "mend": finding.mend},
            )
