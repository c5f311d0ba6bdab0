"""The ledger's end as this gateway saw it, kept outside the broker: a ledger that went back is not written to."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from headrace.contracts.errors import Conflict, HeadraceError
from headrace.mesh.checks.marks import Mark, find_loss, read_mark
from headrace.mesh.connection import Mesh

log = logging.getLogger("headrace.gateway")

PERIOD_S = 2.0


class LedgerMark:
    """A file with the ledger's last sequence and digest."""

    def __init__(self, mesh: Mesh, path: Path) -> None:
        self._mesh = mesh
        self._path = path

    async def check(self) -> None:
        """Raise `Conflict` (`ledger_went_back`) if the ledger lost something that was seen here before."""
        try:
            mark = msgspec.json.decode(self._path.read_bytes(), type=Mark)
        except (OSError, msgspec.MsgspecError):
            return  # the first start here, or a file that a crash cut: there is nothing to compare with
        if (loss := await find_loss(self._mesh, mark)) is not None:
            msg = (
                f"{loss}. No call is made on such a ledger: what it forgot may be made twice. Restore the broker's "
                f"storage; or, if the loss is understood, remove {self._path} and start again"
            )
            raise Conflict(msg, code="ledger_went_back")

    async def keep(self) -> None:
        """Note the ledger's end now and then; raise `Conflict` when it went back, which ends the service."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.check()
                await self.note()
            except Conflict:
                raise
            except HeadraceError as e:
                log.info("the ledger is not compared with its mark", extra={"reason": str(e)[:200]})

    async def note(self) -> None:
        """Note the ledger's end."""
        try:
            mark = await read_mark(self._mesh, self._mesh.topology.ledger)
            if mark is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._path.with_suffix(".new")
                temporary.write_bytes(msgspec.json.encode(mark))
                temporary.replace(self._path)
        except (OSError, HeadraceError) as e:
            log.warning("the ledger's mark is not written", extra={"reason": str(e)[:200]})
