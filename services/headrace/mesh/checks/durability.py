"""What an acknowledgement of this broker is worth, as far as the broker tells: replicas, and whether they keep up."""

from __future__ import annotations

from typing import Final

from headrace.contracts.api import Finding
from headrace.mesh.checks.findings import Unread, attempt, fail, ok, warn
from headrace.mesh.checks.reading import Info, Reading

CHECK: Final = "durability"
QUORUM_REPLICAS: Final = 3
"""From here on an acknowledgement stands on a majority, whatever one disk does."""


async def check_replicas(reading: Reading) -> tuple[list[Finding], list[str]]:
    """Findings of replicated streams, and the names of those that stand on one node alone."""
    topology, wanted = reading.mesh.topology, reading.mesh.settings.replicas
    found: list[Finding] = []
    single: list[str] = []
    seen = 0
    for spec in topology.streams():
        info = await attempt(reading.stream(spec.name))
        if info is None or isinstance(info, Unread) or spec.max_age:
            continue  # told by the check of streams; what expires (reports, suspects) is no work
        seen += 1
        replicas = int(info["config"].get("num_replicas", 1))
        edit = f"nats stream edit {spec.name} --replicas {max(wanted, QUORUM_REPLICAS)}"
        if replicas < wanted:
            found.append(
                warn(CHECK, f"{spec.name} has {replicas} replicas, the setting is replicas = {wanted}", edit)
            )
        elif 1 < replicas < QUORUM_REPLICAS:
            found.append(warn(CHECK, f"{spec.name} has {replicas} replicas: it stops when one is lost", edit))
        if replicas < QUORUM_REPLICAS:
            single.append(spec.name)
        elif state := _peers(spec.name, replicas, info):
            found.append(state)
    if not seen:
        found.append(warn(CHECK, "no stream can be seen: not known", "see the findings of the streams"))
    elif not single and not found:
        found.append(ok(CHECK, f"safe: {QUORUM_REPLICAS} replicas or more of each stream"))
    return found, single


def _peers(stream: str, replicas: int, info: Info) -> Finding | None:
    cluster: Info = info.get("cluster") or {}
    peers: list[Info] = cluster.get("replicas") or []
    behind = [str(peer.get("name", "?")) for peer in peers if peer.get("offline") or not peer.get("current")]
    mend = "bring the servers back, and see their logs"
    if not cluster.get("leader"):
        return fail(CHECK, f"{stream} has no leader: nothing is stored or delivered", mend)
    if behind and 2 * (replicas - len(behind)) <= replicas:
        return fail(CHECK, f"{stream} has lost its majority: {', '.join(behind)} offline or behind", mend)
    return (
        warn(CHECK, f"replicas of {stream} offline or behind: {', '.join(behind)}", mend) if behind else None
    )
