"""What the agents of one process share: a connection, the thread that renews leases, and who notes what they do."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from headrace.mesh.connection import Mesh
from headrace.mesh.group_store import GroupStore
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.mail import Post
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler


class Recorder(Protocol):
    """Notes what agents do. It never waits and never raises: what it has no room for it drops and counts."""

    def record(
        self,
        run: str,
        kind: str,
        data: Any = None,
        *,
        name: str | None = None,
        message: str | None = None,
        peer: str | None = None,
        hop: int = 0,
        trace_id: str | None = None,
    ) -> None:
        """Note that `kind` was done in the conversation `run`."""
        ...


class NoRecorder:
    """Notes nothing."""

    def record(self, run: str, kind: str, data: Any = None, **_more: Any) -> None:
        """Nothing."""


class Host(Struct, frozen=True, kw_only=True):
    """One process that runs agents."""

    mesh: Mesh
    settings: Settings
    leases: LeaseKeeper
    settler: Settler
    post: Post
    """Mails of all agents of this process are stored together, as they come."""
    states: GroupStore
    """And so are their records."""

    def recorder(self, agent: str) -> Recorder:
        """Who notes what `agent` does."""
        return self.recorders.get(agent) or NoRecorder()

    recorders: dict[str, Recorder] = {}
