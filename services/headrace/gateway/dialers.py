"""The dialer of each kind of callee behind one face."""

from __future__ import annotations

from headrace.contracts.account import CallView
from headrace.gateway.callees import Callee
from headrace.gateway.dialing import Attempted, Order
from headrace.gateway.function_dialer import FunctionDialer
from headrace.gateway.http_dialer import HttpDialer
from headrace.mesh.connection import Mesh
from headrace.mesh.redact import Redactor


class Dialers:
    """Functions run on this mesh; everything else is called over HTTP."""

    def __init__(self, mesh: Mesh, redactor: Redactor | None = None) -> None:
        self._http = HttpDialer(redactor)
        self._functions = FunctionDialer(mesh)

    async def start(self) -> None:
        """Hear of results."""
        await self._functions.start()

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()

    async def dial(self, order: Order) -> Attempted:
        """One attempt."""
        return await self._of(order.callee).dial(order)

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """What became of the last attempt of a call."""
        return await self._of(callee).resolve(callee, view)

    def _of(self, callee: Callee) -> HttpDialer | FunctionDialer:
        return self._functions if callee.settings.kind == "function" else self._http
