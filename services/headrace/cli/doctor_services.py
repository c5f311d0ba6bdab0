"""Whether completion and the gateway answer, and what completion finds of its own part."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.cli.api import ask
from headrace.contracts.api import ChecksReply, ChecksRequest, Finding
from headrace.contracts.errors import HeadraceError, InvalidInput, Unavailable
from headrace.mesh.checks.findings import fail, ok, warn

if TYPE_CHECKING:
    from headrace.mesh.checks.reading import Reading

TIMEOUT_S = 5.0
CHECKS_TIMEOUT_S = 20.0


async def check_completion(reading: Reading) -> list[Finding]:
    """Completion, and its own findings: losses of the broker, its disk, its leases, jobs that stand still."""
    began = time.monotonic()
    try:
        reply = await ask(reading.mesh, "checks", ChecksRequest(), ChecksReply, timeout_s=CHECKS_TIMEOUT_S)
    except HeadraceError as e:
        return [_silent("completion", e)]
    return [_answers("completion", began), *reply.findings]


async def check_gateway(reading: Reading) -> list[Finding]:
    """The gateway: an empty submit is refused by one that lives, and stores nothing."""
    began = time.monotonic()
    try:
        await ask(reading.mesh, "submit", {}, dict[str, Any], timeout_s=TIMEOUT_S)
    except InvalidInput:
        pass
    except HeadraceError as e:
        return [_silent("gateway", e)]
    return [_answers("gateway", began)]


def _answers(service: str, began: float) -> Finding:
    return ok(service, f"answers in {(time.monotonic() - began) * 1e3:.0f} ms")


def _silent(service: str, error: HeadraceError) -> Finding:
    if isinstance(error, Unavailable):
        return fail(service, str(error), f"headrace {service}, or see its log")
    return warn(service, str(error), "see its log")
