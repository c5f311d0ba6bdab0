"""The gateway's service: takes work in at `hr.api.submit` and answers with a receipt once it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Raw

from headrace.contracts.api import SubmitReply
from headrace.gateway.intake import store
from headrace.gateway.requests import read_request
from headrace.mesh.checks.start import check_start
from headrace.mesh.microservice import ApiServer
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings

NAME: Final = "headrace-gateway"


class GatewayService(Service):
    """The front door for work. It keeps no state: any number may run, and each restarts alone.

    A stop goes in this order:

    1. take no more requests
    2. answer those in hand: each is stored and confirmed, or its asker is told that it is not known
    3. close the connection
    """

    name = "gateway"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._api: ApiServer | None = None

    async def on_start(self) -> None:
        """Serve; `nats service ls` shows `headrace-gateway` from now on."""
        await check_start(self.mesh, (self.mesh.topology.tasks, self.mesh.topology.jobs))
        self._api = ApiServer(
            self.mesh,
            NAME,
            description="The front door: takes work in and answers with a receipt",
        )
        self._api.endpoint("submit", Raw, self._submit)
        await self._api.start()
        # A service that says it is ready is heard. The answer proves that the broker has read the subscriptions
        # before it; a flush would not, since nats-py sends its ping ahead of what waits in its buffer.
        await self.mesh.request(f"$SRV.PING.{NAME}", b"")

    async def on_drain(self) -> None:
        """Take no more requests and answer those in hand."""
        if self._api is not None:
            await self._api.stop()

    async def _submit(self, body: Raw, headers: Mapping[str, str]) -> SubmitReply:
        request = read_request(bytes(body), self.settings.tenant)
        return await store(self.mesh, request, headers)
