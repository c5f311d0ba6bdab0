"""Work that waits and nobody takes: functions without a worker, and tasks that no consumer matches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import Final

from headrace.contracts.api import Finding
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import FunctionSpec, WorkerReport
from headrace.mesh.checks.consumers import lease_findings
from headrace.mesh.checks.findings import Unread, attempt, fail, ok, some, warn
from headrace.mesh.checks.reading import Info, Reading
from headrace.mesh.jsapi import stream_info

REPORT_AGE_S: Final = 5.0
"""Workers report every second; one that has not for this long is stuck or gone."""
SPARE: Final = 1.5
"""Leases that a consumer should allow for each item that its workers hold: those that are being settled, or wait for
their next try, count as well.
"""


def wanted_leases(held: Iterable[int]) -> int:
    """The `max_ack_pending` that workers need who hold so many items at once each."""
    return ceil(SPARE * sum(held))


async def check_workers(reading: Reading) -> list[Finding]:
    """For each registered function: who reports, who waits for it, and whether enough may be leased."""
    functions = await reading.functions()
    reports = await reading.reports()
    consumers = await attempt(reading.consumers(reading.mesh.topology.tasks))
    if isinstance(consumers, Unread):
        return [consumers.finding("workers")]
    infos = {str(info["name"]): info for info in consumers}
    found: list[Finding] = []
    for function in functions:
        own = [
            infos[c.durable] for c in reading.mesh.topology.function_consumers(function) if c.durable in infos
        ]
        found += _of_function(function, [r for r in reports if r.function == function.name], own)
    mend = "headrace worker, or headrace init --function NAME"
    return found or [warn("workers", "no function is registered", mend)]


def _of_function(function: FunctionSpec, reports: list[WorkerReport], consumers: list[Info]) -> list[Finding]:
    check, command = f"workers of {function.name}", f"headrace worker --function {function.name}"
    waiting = sum(int(c["num_pending"]) + int(c["num_ack_pending"]) for c in consumers)
    pulls = sum(int(c["num_waiting"]) for c in consumers)
    if not reports and not waiting:
        return [warn(check, "none reports", command)]
    if not reports and not pulls:
        return [fail(check, f"none reports or pulls, and {waiting:,} tasks of {function.name} wait", command)]
    if not reports:
        return [
            warn(
                check, f"none reports, though somebody pulls; {waiting:,} tasks wait", "see the workers' logs"
            )
        ]
    now_us = time.time_ns() // 1_000
    late = [r.worker for r in reports if now_us - r.at_us > REPORT_AGE_S * 1e6]
    slots, held = sum(r.slots for r in reports), [max(r.slots, r.in_flight) for r in reports]
    wanted = wanted_leases(held)
    why = f"{len(reports)} workers hold {sum(held):,}, and need {wanted:,}"
    found = lease_findings(f"leases of {function.name}", consumers, wanted, why)
    if late:
        return [warn(check, f"no report for {REPORT_AGE_S:g} s from {some(late)}", "see its log"), *found]
    in_flight = sum(r.in_flight for r in reports)
    return [ok(check, f"{len(reports)} report, {slots:,} slots, {in_flight:,} in flight"), *found]


async def check_stranded(reading: Reading) -> list[Finding]:
    """Tasks that are stored where no consumer takes them from: of a shape or a function that nobody hosts."""
    mesh, topology = reading.mesh, reading.mesh.topology
    stream, consumers = await reading.stream(topology.tasks), await reading.consumers(topology.tasks)
    taken = sum(int(c["num_pending"]) + int(c["num_ack_pending"]) for c in consumers)
    if stream is None or int(stream["state"]["messages"]) <= taken:
        return [ok("stranded tasks", "none")]
    filters = {str(c["config"].get("filter_subject", "")) for c in consumers}
    info = await stream_info(mesh, topology.tasks, subjects_filter=f"{mesh.subjects.prefix}.tasks.*.*.*.*")
    stranded: Counter[tuple[str, str]] = Counter()
    subjects: dict[str, int] = info["state"]["subjects"]
    for subject, count in subjects.items():
        try:
            address = mesh.subjects.parse_task(subject)
        except InvalidInput:
            stranded["", subject] += count
            continue
        if mesh.subjects.tasks_of_shape(address.function, address.lane, address.shape) not in filters:
            stranded[address.function, f"{address.lane.value} t{address.shape}"] += count
    if not stranded:
        return [ok("stranded tasks", "none")]
    texts = [
        f"{count:,} of function {name}, {what}"
        if name
        else f"{count:,} under {what}, which is no task's subject"
        for (name, what), count in stranded.most_common()
    ]
    commands = [f"headrace worker --function {name}" for name in dict.fromkeys(n for n, _ in stranded if n)]
    mend = some(commands) or "see who published them, and purge them (`nats stream purge --subject`)"
    return [fail("stranded tasks", f"no consumer takes {some(texts)}", mend)]


async def check_dead_letters(reading: Reading) -> list[Finding]:
    """Messages that no consumer could take."""
    info = await reading.stream(reading.mesh.topology.dead)
    count = int(info["state"]["messages"]) if info else 0
    if count:
        return [warn("dead letters", f"{count:,} messages", "headrace dead list")]
    return [ok("dead letters", "none")]
