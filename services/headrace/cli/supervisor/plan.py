"""Which processes a mesh has, with their command lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from msgspec import Struct

from headrace.cli.supervisor import tether
from headrace.cli.supervisor.child import ChildSpec
from headrace.cli.supervisor.layout import Layout
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings

SERVER = "nats-server"
FUNCTIONS = "functions"
STOP_MARGIN_S = 8.0
"""What a service may take beyond its own grace (5 s for the last acks, then freeing its engine) before it is killed."""


class Plan(Struct, frozen=True, kw_only=True):
    """One machine's mesh: `settings` as they will be in the services, `url` included."""

    layout: Layout
    settings: Settings
    port: int
    workers: int = 1
    gateways: int = 1
    lifeline: int = -1
    """Reading end of the pipe that ties the services to us."""
    worker_flags: tuple[str, ...] = ()
    functions: str = ""
    """Functions over rows that one more worker serves, as `headrace worker --functions` takes them."""

    def server(self) -> ChildSpec:
        """The broker."""
        server = NatsServer(self.layout.nats, port=self.port, durability=self.settings.durability)
        command = server.command()
        log = self.layout.log(SERVER)
        command[command.index("-l") + 1] = str(log)
        return ChildSpec(
            name=SERVER,
            command=[sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command],
            log=log,
            probe=lambda: answers(self.port),
        )

    def readers(self) -> list[ChildSpec]:
        """Completion and the gateways; each gateway keeps its name, and with it its open calls, over restarts."""
        database = self.settings.completion.database or str(self.layout.database)
        return [
            self._service("completion", "completion", "--database", database),
            *(self._service(name, "gateway", "--name", name) for name in self._gateways()),
        ]

    def worker_specs(self) -> list[ChildSpec]:
        """The workers: `worker-1`, `worker-2`, …, and the one that serves functions over rows."""
        specs = [
            self._service(name, "worker", "--name", name, *self.worker_flags)
            for name in (f"worker-{i}" for i in range(1, self.workers + 1))
        ]
        if self.functions:
            flags = ("--name", FUNCTIONS, *self.worker_flags, "--functions", self.functions)
            specs.append(self._service(FUNCTIONS, "worker", *flags))
        return specs

    def stop_order(self) -> list[list[str]]:
        """Workers first, then the gateways, so that what they finish still lands; the broker last."""
        workers = [f"worker-{i}" for i in range(1, self.workers + 1)]
        workers += [FUNCTIONS] if self.functions else []
        return [workers, self._gateways(), ["completion"], [SERVER]]

    def _gateways(self) -> list[str]:
        return ["gateway", *(f"gateway-{i}" for i in range(2, self.gateways + 1))]

    def _service(self, name: str, command: str, *flags: str) -> ChildSpec:
        self.layout.rotate_log(name)
        ready = self.layout.ready_file(name)
        s = self.settings
        common = ["--dir", str(self.layout.folder), "--url", s.url]
        common += ["--durability", s.durability, "--grace-s", str(s.grace_s)]
        return ChildSpec(
            name=name,
            command=[*own_command(), command, *common, *flags],
            log=self.layout.log(name),
            environment={"HEADRACE_READY_FILE": str(ready), tether.LIFELINE: str(self.lifeline)},
            pass_fds=(self.lifeline,),
            grace_s=s.grace_s + STOP_MARGIN_S,
            ready_file=ready,
        )


def own_command() -> list[str]:
    """How to run `headrace` again as it runs now: the script beside this Python, so that `ps` shows the name."""
    script = Path(sysconfig.get_path("scripts")) / "headrace"
    if script.is_file():
        return [sys.executable, str(script)]
    found = shutil.which("headrace")
    return [found] if found else [sys.executable, "-m", "headrace.cli.main"]


async def answers(port: int) -> bool:
    """Whether a NATS server greets on this port of the loopback address."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return (await reader.read(4)).startswith(b"INFO")
            finally:
                writer.close()
    return False
