"""Checks of the broker: version, JetStream, streams, consumers, durability, disk, clock."""

from __future__ import annotations

import re
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.cli.doctor_services import check_services, check_workers
from headrace.cli.doctor_values import Finding, fail, local_mesh, ok, warn
from headrace.cli.supervisor.layout import Layout
from headrace.contracts.errors import NotFound
from headrace.contracts.topology import GIB, MIN_SERVER
from headrace.mesh import jsapi
from headrace.mesh.provision import differences, list_functions
from headrace.mesh.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.mesh.connection import Mesh

__all__ = ["CHECKS", "LOCAL_CHECKS", "Finding"]

INIT: Final = "headrace init"
QUORUM_REPLICAS: Final = 3
"""From here on an acknowledgement stands on a majority, whatever one disk does."""
MAX_SKEW_S: Final = 2.0
"""Beyond this, ages and deadlines that two machines compare are wrong enough to matter."""


async def check_server(mesh: Mesh) -> list[Finding]:
    """The broker's version, and that JetStream is on."""
    found = tuple(int(n) for n in re.findall(r"\d+", mesh.server_version)[:3])
    wanted = ".".join(map(str, MIN_SERVER))
    shown = ".".join(map(str, found))
    version = (
        ok("server version", shown)
        if found >= MIN_SERVER
        else fail("server version", shown, f"run nats-server {wanted} or newer")
    )
    try:
        account = await jsapi.account_info(mesh)
    except (jsapi.JetStreamError, NotFound) as e:
        return [version, fail("jetstream", str(e), "turn JetStream on in the server's configuration")]
    used, limit = int(account.get("storage", 0)), int(account.get("limits", {}).get("max_storage", -1))
    text = f"on, {used / GIB:.2f} GiB stored" + (f" of {limit / GIB:.1f} GiB" if limit > 0 else "")
    if limit > 0 and used > 0.9 * limit:
        return [version, warn("jetstream", text, "raise the account's storage: full streams refuse work")]
    return [version, ok("jetstream", text)]


async def check_streams(mesh: Mesh) -> list[Finding]:
    """Every stream of the topology, setting by setting."""
    findings: list[Finding] = []
    for spec in mesh.topology.streams():
        name = f"stream {spec.name}"
        try:
            info = await jsapi.stream_info(mesh, spec.name)
        except NotFound:
            findings.append(fail(name, "missing", INIT))
            continue
        drift = differences(name, spec.config(), info["config"])
        if drift:
            findings.append(
                fail(name, "; ".join(d.removeprefix(f"{name}: ") for d in drift), "set it so, or remake it")
            )
        else:
            findings.append(ok(name, f"{int(info['state']['messages']):,} messages"))
    return findings


async def check_consumers(mesh: Mesh) -> list[Finding]:
    """Completion's consumers and those of every registered function."""
    wanted = mesh.topology.completion_consumers()
    for function in await list_functions(mesh):
        wanted += mesh.topology.function_consumers(function)
    missing: list[str] = []
    drift: list[str] = []
    for spec in wanted:
        try:
            info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
        except NotFound:
            missing.append(f"{spec.stream}/{spec.durable}")
        else:
            drift += differences(f"{spec.stream}/{spec.durable}", spec.config(), info["config"])
    findings: list[Finding] = []
    if missing:
        findings.append(
            fail("consumers", f"missing: {_some(missing)}", f"{INIT}; a worker makes those of its function")
        )
    if drift:
        findings.append(
            fail("consumers", _some(drift), "remove the consumer and run headrace init: its messages stay")
        )
    return findings or [ok("consumers", f"{len(wanted)} present")]


async def check_clock(mesh: Mesh) -> list[Finding]:
    """This machine's clock against the broker's."""
    before = time.time()
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    after = time.time()
    stamp = str(info.get("ts", ""))
    if not stamp:
        return [warn("clock", "the broker does not say its time", "compare the clocks by hand")]
    # The broker gives nanoseconds; Python reads six digits.
    theirs = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp)).timestamp()
    offset = theirs - (before + after) / 2
    text = f"broker is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'}"
    if abs(offset) - (after - before) / 2 > MAX_SKEW_S:
        return [
            warn(
                "clock", text, "synchronise the clocks (NTP): deadlines and ages are compared across machines"
            )
        ]
    return [ok("clock", text)]


async def check_dead_letters(mesh: Mesh) -> list[Finding]:
    """Messages that no consumer could take."""
    count = int((await jsapi.stream_info(mesh, mesh.topology.dead))["state"]["messages"])
    if count:
        return [warn("dead letters", f"{count:,} messages", "headrace sql 'SELECT * FROM dead'")]
    return [ok("dead letters", "none")]


def check_durability(settings: Settings) -> list[Finding]:
    """Whether an acknowledgement means what the profile says. Only a local server's configuration can be read."""
    local = local_mesh(settings)
    if settings.replicas >= QUORUM_REPLICAS:
        return [ok("durability", f"{settings.replicas} replicas")]
    if local is None:
        return [warn("durability", "the server's sync_interval cannot be read from here",
                     "on one node, `safe` needs sync_interval: always; on three, replicas = 3")]  # fmt: skip
    config = Layout(Path(settings.dir)).nats / "nats-server.conf"
    try:
        synced = (
            re.search(r"^\s*sync_interval\s*:\s*always", config.read_text("utf-8"), re.MULTILINE) is not None
        )
    except OSError as e:
        return [warn("durability", f"cannot read {config}: {e}", "run doctor where the broker runs")]
    if synced:
        return [ok("durability", "safe: each message is on disk before it is acknowledged")]
    text = "relaxed: up to two minutes of acknowledged messages are lost with the machine"
    if "safe" in (local.durability, settings.durability) and local.durability != "relaxed":
        return [
            fail("durability", f"the profile is safe, the server is {text}", "restart with --durability safe")
        ]
    return [warn("durability", text, "start with --durability safe")]


def check_disk(settings: Settings) -> list[Finding]:
    """Room on the volume of a local mesh: a full disk freezes its streams."""
    if local_mesh(settings) is None:
        return [ok("disk", "the mesh is elsewhere: not looked at")]
    usage = shutil.disk_usage(settings.dir)
    text = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < GIB:
        return [fail("disk", text, "make room: a full disk freezes the broker's streams")]
    if usage.free < 5 * GIB:
        return [warn("disk", text, "make room, or move the mesh's folder")]
    return [ok("disk", text)]


def _some(lines: list[str], limit: int = 5) -> str:
    more = f" and {len(lines) - limit} more" if len(lines) > limit else ""
    return "; ".join(lines[:limit]) + more


CHECKS: Final[tuple[tuple[str, Callable[[Mesh], Awaitable[list[Finding]]]], ...]] = (
    ("server", check_server),
    ("streams", check_streams),
    ("consumers", check_consumers),
    ("dead letters", check_dead_letters),
    ("clock", check_clock),
    ("services", check_services),
    ("workers", check_workers),
)
LOCAL_CHECKS: Final[tuple[Callable[[Settings], list[Finding]], ...]] = (check_durability, check_disk)
