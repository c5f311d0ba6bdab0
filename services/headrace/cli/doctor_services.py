"""Checks of what runs on the mesh: completion, the gateway, the workers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from headrace.cli.api import ask
from headrace.cli.doctor_values import Finding, fail, ok, warn
from headrace.contracts import codec
from headrace.contracts.api import JobsRequest
from headrace.contracts.errors import HeadraceError, InvalidInput, Unavailable
from headrace.mesh import jsapi
from headrace.mesh.provision import list_functions

if TYPE_CHECKING:
    from headrace.contracts.messages import WorkerReport
    from headrace.mesh.connection import Mesh

REPORT_AGE_S: Final = 5.0
"""Workers report every second; one that has not for this long is stuck or gone."""


async def check_services(mesh: Mesh) -> list[Finding]:
    """Whether completion and the gateway answer."""
    return [
        await _answers(mesh, "completion", "jobs", JobsRequest(limit=1)),
        # An empty submit is refused by a gateway that lives, and stores nothing.
        await _answers(mesh, "gateway", "submit", {}),
    ]


async def check_workers(mesh: Mesh) -> list[Finding]:
    """Whether each registered function has workers that report, and may lease as much as they can run."""
    reports = await worker_reports(mesh)
    findings: list[Finding] = []
    now_us = time.time() * 1e6
    for function in await list_functions(mesh):
        check = f"workers of {function.name}"
        own = [r for r in reports if r.function == function.name]
        late = [r.worker for r in own if now_us - r.at_us > REPORT_AGE_S * 1e6]
        if not own:
            findings.append(warn(check, "none reports", "headrace worker --function " + function.name))
            continue
        slots = sum(r.slots for r in own)
        bound = min(c.max_ack_pending for c in mesh.topology.function_consumers(function))
        if late:
            findings.append(
                warn(check, f"no report for {REPORT_AGE_S:g} s from {', '.join(late[:5])}", "see its log")
            )
        elif slots * 1.5 > bound:
            findings.append(
                warn(check, f"{slots} slots, and a consumer leases {bound} at most", "raise max_ack_pending")
            )
        else:
            findings.append(
                ok(check, f"{len(own)} report, {slots} slots, {sum(r.in_flight for r in own)} in flight")
            )
    return findings or [
        warn("workers", "no function is registered", "headrace worker, or headrace init --function NAME")
    ]


async def worker_reports(mesh: Mesh) -> list[WorkerReport]:
    """The last report of each worker that reported lately."""
    bucket = mesh.topology.workers_bucket
    info = await jsapi.stream_info(mesh, f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.>")
    found: list[WorkerReport] = []
    for subject in sorted(info["state"]["subjects"]):
        stored = await jsapi.last_message(mesh, f"KV_{bucket}", subject)
        if stored is not None and stored.data:
            found.append(codec.WORKER_REPORT.decode(stored.data))
    return found


async def _answers(mesh: Mesh, service: str, endpoint: str, request: Any) -> Finding:
    began = time.monotonic()
    try:
        await ask(mesh, endpoint, request, dict[str, Any], timeout_s=5.0)
    except InvalidInput:
        pass
    except Unavailable as e:
        return fail(service, str(e), f"headrace {service}, or see its log")
    except HeadraceError as e:
        return warn(service, str(e), "see its log")
    return ok(service, f"answers in {(time.monotonic() - began) * 1e3:.0f} ms")
