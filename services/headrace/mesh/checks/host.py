"""The machine that a process of the mesh runs on: room on a volume, and open files."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Final

from headrace.contracts.api import Finding
from headrace.contracts.topology import GIB
from headrace.mesh.checks.findings import fail, ok, warn

NO_ROOM_BYTES: Final = GIB
LITTLE_ROOM_BYTES: Final = 5 * GIB
FEW_FILES: Final = 1_024
"""A broker needs a file for each connection and a few for each stream; macOS gives a process 256 unless told."""


def check_volume(check: str, path: Path, consequence: str) -> Finding:
    """Room on the volume of `path`, or of its nearest folder that exists; `consequence` says what a full one does."""
    folder = next((p for p in (path, *path.absolute().parents) if p.is_dir()), Path("/"))
    try:
        usage = shutil.disk_usage(folder)
    except OSError as e:
        return warn(check, f"the room on {folder} cannot be read: {e}", "look at it by hand")
    text = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB for {path}"
    if usage.free < NO_ROOM_BYTES:
        return fail(check, text, f"make room: {consequence}")
    if usage.free < LITTLE_ROOM_BYTES:
        return warn(check, text, f"make room, or move it to another volume: {consequence}")
    return ok(check, text)


def check_files(check: str, limit: int | None = None) -> Finding:
    """The limit of open files: `limit`, else this process's own."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if 0 <= soft < FEW_FILES:
        mend = f"ulimit -n {FEW_FILES * 64} (or LimitNOFILE in the unit file) before it starts"
        return warn(check, f"{soft:,} at most: connections and stores fail beyond", mend)
    return ok(check, "unlimited" if soft < 0 else f"{soft:,} at most")
