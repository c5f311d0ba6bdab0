"""What a finding is, and the small readings that checks share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from headrace.mesh.settings import MeshFile, Settings, read_mesh_file

State = Literal["ok", "warn", "fail"]


class Finding(Struct, frozen=True):
    """One thing that was looked at: what was found, and how to mend it where that is needed."""

    check: str
    state: State
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, mend: str) -> Finding:
    """Works, with a risk."""
    return Finding(check, "warn", found, mend)


def fail(check: str, found: str, mend: str) -> Finding:
    """Does not work, or may lose what was acknowledged."""
    return Finding(check, "fail", found, mend)


def local_mesh(settings: Settings) -> MeshFile | None:
    """The mesh of the settings' folder if that is the one being spoken to, else None."""
    found = read_mesh_file(Path(settings.dir))
    return found if found and found.url == settings.url else None
