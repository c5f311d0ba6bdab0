"""The life cycle: start, run, stop; double stop, stop before start, a failed start, a dead side task, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.mesh.server import NatsServer
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings

pytestmark = pytest.mark.anyio


class Recorder(Service):
    """Writes down what happens to it."""

    name = "recorder"

    def __init__(self, settings: Settings, *, fail: bool = False) -> None:
        super().__init__(settings)
        self.fail = fail
        self.seen: list[str] = []

    async def on_start(self) -> None:
        """Start, or fail after having taken something."""
        self.seen.append("start")
        if self.fail:
            msg = "the model is missing"
            raise HeadraceError(msg)

    async def on_drain(self) -> None:
        """Note."""
        self.seen.append("drain")

    async def on_stop(self) -> None:
        """Note."""
        self.seen.append("stop")


async def test_order_and_double_stop(settings: Settings) -> None:
    service = Recorder(settings)
    await service.stop()
    await service.start()
    await service.stop()
    await service.stop()
    assert service.seen == ["start", "drain", "stop"]
    assert service.mesh.closed.is_set()


async def test_a_failed_start_frees_what_was_taken(settings: Settings) -> None:
    service = Recorder(settings, fail=True)
    with pytest.raises(HeadraceError, match="model is missing"):
        await service.start()
    assert service.seen == ["start", "stop"]
    assert service.mesh.closed.is_set()


async def test_no_broker_is_one_sentence(
    settings: Settings, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.mesh.connection.FIRST_CONNECT_S", 0.2)
    nats_server.kill()
    with pytest.raises(Unavailable, match=f"no broker answers at nats://127.0.0.1:{nats_server.port}"):
        await Recorder(settings).start()


async def test_a_dead_side_task_stops_the_service(settings: Settings) -> None:
    service = Recorder(settings)
    await service.start()

    async def die() -> None:
        msg = "renewal ended"
        raise RuntimeError(msg)

    service.spawn(die(), "renewal")
    async with asyncio.timeout(5):
        await service.run_until_stopped()
    assert str(service.failure) == "renewal ended"
    await service.stop()
    assert service.seen == ["start", "drain", "stop"]


SCRIPT = textwrap.dedent(
    """
    import asyncio, sys
    from headrace.mesh.service import Service, run_service
    from headrace.mesh.settings import Settings
    class Slow(Service):
        name = "slow"
        async def on_drain(self):
            print("draining", flush=True)
            if sys.argv[2] == "hang":
                await asyncio.sleep(60)
    sys.exit(run_service(Slow, Settings(url=sys.argv[1])))
    """
)


@pytest.mark.parametrize("how", ["quick", "hang"])
async def test_first_signal_drains_second_ends(nats_server: NatsServer, tmp_path: Path, how: str) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, nats_server.url, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "HEADRACE_READY_FILE": str(ready)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while not ready.exists():
            assert process.poll() is None
            await asyncio.sleep(0.01)
    assert int(ready.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"draining\n"
    if how == "hang":
        process.send_signal(signal.SIGTERM)
    assert process.wait(10) == (1 if how == "hang" else 0)
