"""Checks of a mesh that `headrace up` runs on this machine: its folder, its broker's configuration, its processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from headrace.cli.supervisor.layout import Layout, read_state
from headrace.contracts.api import Finding
from headrace.contracts.topology import GIB
from headrace.mesh.checks.durability import CHECK
from headrace.mesh.checks.findings import fail, ok, some, warn
from headrace.mesh.checks.host import check_files, check_volume
from headrace.mesh.checks.server import NEARLY_FULL
from headrace.mesh.settings import MeshFile, Settings, read_mesh_file

_STORE: Final = re.compile(r"Max Storage:\s+([\d.]+) ([KMGTPE]?B)")
_UNITS: Final = {
    "B": 1,
    "KB": 1 << 10,
    "MB": 1 << 20,
    "GB": 1 << 30,
    "TB": 1 << 40,
    "PB": 1 << 50,
    "EB": 1 << 60,
}
_FILES: Final = re.compile(r"^Max open files\s+(\d+|unlimited)", re.MULTILINE)


def local_mesh(settings: Settings) -> MeshFile | None:
    """The mesh of the settings' folder if that is the one being spoken to, else None."""
    found = read_mesh_file(Path(settings.dir))
    return found if found and found.url == settings.url else None


def local_findings(settings: Settings) -> list[Finding]:
    """Disk, the broker's own limit, and open files of a local mesh; of another one nothing can be seen from here."""
    if local_mesh(settings) is None:
        return [ok("disk", "the mesh is elsewhere: not looked at")]
    layout = Layout(Path(settings.dir))
    disk = check_volume("disk", layout.folder, "a full disk freezes the broker's streams")
    return [disk, *_store_limit(layout), *_open_files(layout)]


def check_sync(settings: Settings, single: list[str]) -> list[Finding]:
    """What an acknowledgement of `single`, the streams on one node, means: whether it is on disk before it is given."""
    local, streams = local_mesh(settings), some(single)
    if local is None:
        mend = "if the broker is one node, set sync_interval: always in its jetstream block; of three, replicas = 3"
        return [warn(CHECK, f"one replica of {streams}, and sync_interval cannot be read from here", mend)]
    config = Layout(Path(settings.dir)).nats / "nats-server.conf"
    try:
        text = config.read_text("utf-8")
    except OSError as e:
        return [warn(CHECK, f"cannot read {config}: {e}", "run doctor where the broker runs")]
    if re.search(r"^\s*sync_interval\s*:\s*\"?always", text, re.MULTILINE):
        return [ok(CHECK, "safe: each message is on disk before it is acknowledged (sync_interval: always)")]
    interval = re.search(r"^\s*sync_interval\s*:\s*\"?(\w+)", text, re.MULTILINE)
    window = interval[1] if interval else "2m, the broker's default"
    found = f"relaxed: what was acknowledged in the last {window} (sync_interval) is lost with the machine"
    if "safe" in (local.durability, settings.durability) and local.durability != "relaxed":
        return [fail(CHECK, f"the profile is safe, the server is {found}", "restart with --durability safe")]
    return [warn(CHECK, found, "start with --durability safe, which sets sync_interval: always")]


def _store_limit(layout: Layout) -> list[Finding]:
    """The broker refuses what its store limit does not hold, whatever the disk has; it tells it in its log only."""
    try:
        found = _STORE.search(layout.log("nats-server").read_text("utf-8", "replace"))
        used = sum(f.stat().st_size for f in (layout.nats / "jetstream").rglob("*") if f.is_file())
    except OSError:
        return []  # no log, or a file that went while it was counted: nothing certain to say
    if found is None or found[2] not in _UNITS:
        return []
    limit = float(found[1]) * _UNITS[found[2]]
    text = f"{used / GIB:.2f} GiB of {limit / GIB:.2f} GiB (max_file_store)"
    if used >= NEARLY_FULL * limit:
        mend = "make room on the disk and restart the broker: its limit is a share of what is free then"
        return [warn("broker store", f"{text}: a full store refuses work", mend)]
    return [ok("broker store", text)]


def _open_files(layout: Layout) -> list[Finding]:
    """The limits of the running processes themselves, where the system tells them; else what they would get."""
    state = read_state(layout.folder)
    limits: dict[str, int] = {}
    for name, pid in (state.pids if state else {}).items():
        try:
            found = _FILES.search(Path(f"/proc/{pid}/limits").read_text())
        except OSError:
            continue
        if found is not None:
            limits[name] = -1 if found[1] == "unlimited" else int(found[1])
    if not limits:
        return [check_files("open files")]
    lowest = min(limits, key=lambda name: limits[name] if limits[name] >= 0 else 1 << 62)
    return [check_files(f"open files of {lowest}", limits[lowest])]
