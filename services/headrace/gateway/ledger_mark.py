"""The ledger's end as it was seen here, kept outside the broker: a ledger that went back is not written to.

Two keep such a mark: the gateways of a machine, in a file of the mesh's folder, and completion, in its data plane.
Either may be gone or late, so a loss counts whichever of them has seen it, until `headrace ledger accept`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.contracts.api import LossesReply, LossesRequest, LostData
from headrace.contracts.errors import Conflict, HeadraceError
from headrace.mesh.checks.marks import Mark, find_loss, read_mark
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api

log = logging.getLogger("headrace.gateway")

PERIOD_S: Final = 1.0
COMPLETION_S: Final = 5.0
"""How long completion is waited for; without it the file alone decides."""

FILE: Final = "run/ledger.json"
"""Of the mesh's folder."""

MEND: Final = (
    "No call is made on such a ledger: what it forgot could be made twice. Restore the broker's storage; or see what "
    "is missing with `headrace ledger verify` and `headrace sql` (docs/ledger.md), then take it as it is with "
    "`headrace ledger accept`, on each machine that runs gateways"
)


class WentBack(Conflict):
    """The ledger lost something that was seen before."""

    code = "ledger_went_back"


class MarkFile:
    """The mark of the gateways of one machine. Several may write it: the newest stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Mark | None:
        """The mark; None before the first, or if it is unreadable, which is logged."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Mark)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as e:
            log.error(  # noqa: TRY400  (it says all)
                "the ledger's mark is unreadable", extra={"path": str(self.path), "reason": str(e)[:200]}
            )
            return None

    def write(self, mark: Mark) -> None:
        """Write a mark, on disk and in one step; raise `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(mark))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


class LedgerMark:
    """The ledger as one gateway sees it. `sure` is asked before anything is written to it."""

    def __init__(self, mesh: Mesh, path: Path) -> None:
        self._mesh = mesh
        self._file = MarkFile(path)
        self._seen: Mark | None = None
        self._written = 0
        self._compared = -1
        """How many connections had been lost when the ledger was compared with its mark."""
        self._comparing = asyncio.Lock()
        self._wake = asyncio.Event()

    async def check(self) -> None:
        """Raise `WentBack` if the ledger lost something that was seen before, here or by completion."""
        await self.sure()
        for lost in await losses_of_completion(self._mesh) or ():
            raise _went_back(f"{lost.found} (completion saw it)")

    async def sure(self) -> None:
        """Return if the ledger is the one that was seen; raise `WentBack`, or `Unavailable` if that is not known.

        It is compared anew after each lost connection: only a broker that was away can come back with less.
        """
        if self._compared == self._mesh.losses:
            return
        async with self._comparing:
            while self._compared != self._mesh.losses:
                losses = self._mesh.losses
                await self._compare()
                self._compared = losses

    def wrote(self, seq: int) -> None:
        """A record was stored under `seq`: whatever comes after, the ledger reaches that far."""
        self._written = max(self._written, seq)

    async def _compare(self) -> None:
        marks = [self._seen, self._file.read()]
        if self._seen is not None and self._written > self._seen.last_seq:
            marks.append(replace(self._seen, last_seq=self._written, digest=None))
        for mark in marks:
            if mark is not None and (loss := await find_loss(self._mesh, mark, kept=True)) is not None:
                self._keep(mark)  # what only this process knew would end with it
                raise _went_back(loss)

    async def keep(self) -> None:
        """Note the ledger's end now and then; raise `WentBack` when it went back, which ends the service."""
        wake: Callable[[], None] = self._wake.set
        self._mesh.on_reconnect(wake)
        try:
            while True:
                try:
                    await self.sure()
                    await self.note()
                except WentBack:
                    raise
                except HeadraceError as e:
                    log.info("the ledger is not compared with its mark", extra={"reason": str(e)[:200]})
                try:
                    async with asyncio.timeout(PERIOD_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        finally:
            self._mesh.off_reconnect(wake)

    async def note(self) -> None:
        """Note the ledger's end, unless it is noted."""
        losses = self._mesh.losses
        try:
            mark = await read_mark(self._mesh, self._mesh.topology.ledger)
            # What is read of another life of the broker than was compared is no mark yet.
            if mark is None or mark == self._seen or losses != self._compared:
                return
            self._seen = mark
            await asyncio.to_thread(self._keep, mark)  # a disk may take its time
        except HeadraceError as e:
            log.warning("the ledger's mark is not read", extra={"reason": str(e)[:200]})

    def _keep(self, mark: Mark) -> None:
        """Write a mark, unless a newer one is written."""
        written = self._file.read()
        if written is not None and written.created == mark.created and written.last_seq >= mark.last_seq:
            return
        try:
            self._file.write(mark)
        except OSError as e:
            log.warning("the ledger's mark is not written", extra={"reason": str(e)[:200]})


async def losses_of_completion(mesh: Mesh) -> list[LostData] | None:
    """What completion knows the ledger to have lost, and nobody has accepted; None if completion does not answer."""
    try:
        request = LossesRequest(stream=mesh.topology.ledger)
        data = await call_api(mesh, "losses", request, timeout_s=COMPLETION_S)
        return msgspec.json.decode(data, type=LossesReply).losses
    except (HeadraceError, msgspec.MsgspecError) as e:
        log.info("completion does not say what it saw of the ledger", extra={"reason": str(e)[:200]})
        return None


def _went_back(what: str) -> WentBack:
    return WentBack(f"{what}. {MEND}")
