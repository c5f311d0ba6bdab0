"""What lies where in the folder of a mesh, and the port that it keeps.

`mesh.json` says how to reach the mesh; `nats/` is the broker's store, `data/` the data plane, `logs/` one
file a process, `run/` the ready files. Nothing is written outside the folder.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.contracts.errors import InvalidInput, Refused
from headrace.mesh.settings import MESH_FILE, MeshFile, read_mesh_file

LOG_LIMIT_BYTES = 16 << 20


class MeshState(MeshFile, kw_only=True):
    """`mesh.json` as the supervisor writes it: `MeshFile` and the processes by name (none if it does not run)."""

    model: str | None = None
    worker_flags: list[str] = msgspec.field(default_factory=list[str])
    pids: dict[str, int] = msgspec.field(default_factory=dict[str, int])


def read_state(folder: Path) -> MeshState | None:
    """What the last `headrace up` in `folder` wrote, or None."""
    try:
        return msgspec.json.decode((folder / MESH_FILE).read_bytes(), type=MeshState)
    except (OSError, msgspec.MsgspecError):
        return None


class Layout:
    """Paths under one folder, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def create(self) -> None:
        """Make the folders; `InvalidInput` if that cannot be."""
        try:
            for path in (self.folder, self.nats, self.data, self.logs, self.run):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InvalidInput(f"cannot use {self.folder} as the mesh's folder: {e}", field="dir") from None

    @property
    def nats(self) -> Path:
        """The broker's configuration and store."""
        return self.folder / "nats"

    @property
    def data(self) -> Path:
        """The data plane."""
        return self.folder / "data"

    @property
    def database(self) -> Path:
        """The DuckDB file, written by completion alone."""
        return self.data / "headrace.duckdb"

    @property
    def logs(self) -> Path:
        """One log for each process."""
        return self.folder / "logs"

    @property
    def run(self) -> Path:
        """Ready files."""
        return self.folder / "run"

    def log(self, name: str) -> Path:
        """The log of one process."""
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """Written by a service once it has started, with its pid."""
        return self.run / f"{name}.ready"

    def write_state(self, state: MeshState) -> None:
        """Replace mesh.json in one step: a reader sees the old one or the new one."""
        temporary = self.folder / f"{MESH_FILE}.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        temporary.replace(self.folder / MESH_FILE)

    def rotate_log(self, name: str) -> None:
        """Set a log aside once it is large; one older one is kept."""
        log = self.log(name)
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > LOG_LIMIT_BYTES:
                log.replace(log.with_suffix(".log.old"))


def choose_port(layout: Layout, wanted: int | None) -> int:
    """The port asked for, else the one that this folder had before, else a free one; `Refused` if it is in use."""
    remembered = read_mesh_file(layout.folder)
    port = wanted or (remembered.port if remembered else 0)
    if not port:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])
    if not port_is_free(port):
        origin = "" if wanted else f", which {layout.folder} had before,"
        raise Refused(
            f"port {port}{origin} is in use: free it, or choose another with --port", code="port_in_use"
        )
    return port


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address now."""
    with socket.socket() as s:
        s.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as nats-server does: TIME_WAIT is no obstacle
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: ours, and `extra`."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
