"""Which checks `headrace doctor` runs, in the order in which it shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from headrace.cli.doctor_local import check_sync, local_findings
from headrace.cli.doctor_services import check_completion, check_gateway
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.mesh.checks.backlog import check_dead_letters, check_stranded, check_workers
from headrace.mesh.checks.consumers import check_consumers, check_strangers
from headrace.mesh.checks.durability import check_replicas
from headrace.mesh.checks.findings import Unread, fail
from headrace.mesh.checks.reading import Reading
from headrace.mesh.checks.server import check_clock, check_jetstream, check_version
from headrace.mesh.checks.streams import check_streams

if TYPE_CHECKING:
    from headrace.contracts.api import Finding
    from headrace.mesh.connection import Mesh

Check = Callable[[Reading], Awaitable[list["Finding"]]]


async def _version(reading: Reading) -> list[Finding]:
    return [check_version(reading.mesh)]


async def _durability(reading: Reading) -> list[Finding]:
    found, single = await check_replicas(reading)
    return [*found, *(check_sync(reading.mesh.settings, single) if single else [])]


async def _clock(reading: Reading) -> list[Finding]:
    return await check_clock(reading.mesh)


CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("server version", _version),
    ("jetstream", check_jetstream),
    ("streams", check_streams),
    ("durability", _durability),
    ("consumers", check_consumers),
    ("strangers", check_strangers),
    ("workers", check_workers),
    ("stranded tasks", check_stranded),
    ("dead letters", check_dead_letters),
    ("completion", check_completion),
    ("gateway", check_gateway),
    ("clock", _clock),
)


async def examine(mesh: Mesh) -> list[Finding]:
    """Every finding of a mesh that answers: a check that fails, or may not look, keeps no other from its work."""
    reading = Reading(mesh)
    # All at once: where a user may not even receive answers, each check waits out its time.
    found = await asyncio.gather(*(_run(name, check, reading) for name, check in CHECKS))
    return [finding for part in found for finding in part] + local_findings(mesh.settings)


async def _run(name: str, check: Check, reading: Reading) -> list[Finding]:
    try:
        return await check(reading)
    except Unavailable as e:
        return [Unread(e).finding(name)]
    except HeadraceError as e:
        return [fail(name, str(e), "see the broker's log")]
