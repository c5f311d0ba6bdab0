"""Fixtures of the agents' tests: settings with short leases and tries, on one event loop."""

from __future__ import annotations

import pytest
import uvloop

from headrace.mesh.server import NatsServer
from headrace.mesh.settings import AgentSettings, Settings


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: object) -> Settings:
    """Settings that point at the broker of this test; failed tries come again at once."""
    return Settings(
        url=nats_server.url,
        dir=str(tmp_path),
        durability="relaxed",
        ack_wait_s=2.0,
        grace_s=5.0,
        mailbox_messages=10_000,
        agent=AgentSettings(retry_s=0.05, retry_cap_s=0.2, message_tries=3, patience_s=5.0),
    )
