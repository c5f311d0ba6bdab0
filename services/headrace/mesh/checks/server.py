"""The broker itself: its version, JetStream, the limits of the account, its clock."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any, Final

from headrace.contracts.api import Finding
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.topology import GIB, MIN_SERVER
from headrace.mesh.checks.findings import Unread, attempt, fail, ok, warn
from headrace.mesh.checks.reading import Info, Reading
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import JetStreamError, call

NEARLY_FULL: Final = 0.9
"""Share of a limit from which on it is said to be near."""
MAX_SKEW_S: Final = 2.0
"""Beyond this, ages and deadlines that two machines compare are wrong enough to matter."""
OFF: Final = (10039, 10076)
"""JetStream's errors for: not enabled for this account, not enabled at all."""


def check_version(mesh: Mesh) -> Finding:
    """The broker's version, as it says itself."""
    found = tuple(int(n) for n in re.findall(r"\d+", mesh.server_version)[:3])
    wanted, shown = ".".join(map(str, MIN_SERVER)), ".".join(map(str, found))
    if found >= MIN_SERVER:
        return ok("server version", shown)
    return fail(
        "server version", f"{shown or 'unknown'}, older than {wanted}", f"run nats-server {wanted} or newer"
    )


def is_off(error: HeadraceError) -> bool:
    """Whether `error`, of a request of the account's information, says that JetStream is off."""
    if isinstance(error, JetStreamError):
        return error.err_code in OFF
    return isinstance(error, Unavailable) and error.code == "no_responders"


async def check_jetstream(reading: Reading) -> list[Finding]:
    """That JetStream is on, how full the account is, and which of its limits refuse what the mesh needs."""
    try:
        account = await attempt(reading.account())
    except JetStreamError as e:
        return [
            fail("jetstream", str(e), "turn JetStream on in the server's configuration, and for this account")
        ]
    if isinstance(account, Unread):
        if is_off(account.error):
            return [fail("jetstream", "it is off", "turn JetStream on in the server's configuration")]
        return [account.finding("jetstream")]
    tier: Info = account.get("tiers", {}).get(f"R{reading.mesh.settings.replicas}", account)
    limits: Info = tier.get("limits", {})
    return [_storage(tier, limits), *await _limits(reading, tier, limits)]


def _storage(usage: Info, limits: Info) -> Finding:
    used, limit = int(usage.get("storage", 0)), int(limits.get("max_storage", -1))
    text = f"on, {used / GIB:.2f} GiB stored" + (f" of {limit / GIB:.2f} GiB" if limit > 0 else "")
    if limit > 0 and used >= NEARLY_FULL * limit:
        return warn("jetstream", text, "raise the account's max_store: full streams refuse work")
    return ok("jetstream", text)


async def _limits(reading: Reading, usage: Info, limits: Info) -> list[Finding]:
    mesh, found = reading.mesh, list[Finding]()

    def bound(name: str) -> int:
        return int(limits.get(name) or -1)

    def short(setting: str, text: str, mend: str) -> None:
        found.append(fail("account limits", f"{setting}: {text}", mend))

    missing = [s.name for s in mesh.topology.streams() if await reading.stream(s.name) is None]
    needed = int(usage.get("streams", 0)) + len(missing)
    if missing and 0 < bound("max_streams") < needed:
        short(
            "max_streams",
            f"{bound('max_streams')}, and {needed} are needed",
            f"set max_streams: {needed} or more",
        )
    functions = await reading.functions()
    consumers = sum(len(mesh.topology.function_consumers(f)) for f in functions)
    if 0 < bound("max_consumers") < consumers:
        text = f"{bound('max_consumers')} in a stream, and the functions of this mesh need {consumers}"
        short("max_consumers", text, f"set max_consumers: {consumers} or more")
    topology = mesh.topology
    specs = topology.completion_consumers() + topology.gateway_consumers()
    specs += [c for f in functions for c in topology.function_consumers(f)]
    leases = max(spec.max_ack_pending for spec in specs)
    if 0 < bound("max_ack_pending") < leases:
        text = f"{bound('max_ack_pending'):,}: consumers that lease {leases:,} cannot be made"
        short("max_ack_pending", text, f"set max_ack_pending: {leases} or more for the account")
    if limits.get("max_bytes_required"):
        short(
            "max_bytes_required",
            "true: streams without a bound cannot be made",
            "set max_bytes_required: false",
        )
    if (bytes_ := bound("storage_max_stream_bytes")) > 0:
        text = f"store_max_stream_bytes: a stream holds {bytes_ / GIB:.2f} GiB at most, and then refuses"
        found.append(warn("account limits", text, "raise it, or set max_bytes below it"))
    return found or [ok("account limits", "none that refuses what this mesh needs")]


async def check_clock(mesh: Mesh) -> list[Finding]:
    """This machine's clock against the broker's; nothing if no stream is there to tell its time."""
    for spec in mesh.topology.streams():
        before = time.time()
        try:
            info = await call(mesh, f"STREAM.INFO.{spec.name}")
        except JetStreamError:
            continue
        return [_skew(info, before, time.time())]
    return []


def _skew(info: dict[str, Any], before: float, after: float) -> Finding:
    stamp = str(info.get("ts", ""))
    if not stamp:
        return warn("clock", "the broker does not say its time", "compare the clocks by hand")
    # The broker gives nanoseconds; Python reads six digits.
    theirs = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp)).timestamp()
    offset = theirs - (before + after) / 2
    text = f"broker is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'}"
    if abs(offset) - (after - before) / 2 > MAX_SKEW_S:
        mend = "synchronise the clocks (NTP): deadlines and ages are compared across machines"
        return warn("clock", text, mend)
    return ok("clock", text)
