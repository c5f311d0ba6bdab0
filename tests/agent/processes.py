"""A process with agents of the crew: told where to die, killed, and started again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.mesh.server import NatsServer
from tests.chaos.processes import Part

SETTINGS = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0
grace_s = 2.0
[agent]
retry_s = 0.05
retry_cap_s = 0.2
message_tries = 10
"""


class Hosted(Part):
    """Agents by their names in the crew, in one process."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__("-".join(names), folder)
        self._command = [sys.executable, "-m", "tests.agent.run_agents", str(folder), *names]

    async def restart(self, *, crash_at: str = "") -> None:
        """Start it, and return when it is ready, or dead."""
        self.start(crash_at=crash_at)
        await self.ready()


@contextlib.contextmanager
def crew(server: NatsServer, folder: Path, *hosts: tuple[str, ...]) -> Iterator[list[Hosted]]:
    """A process for each of `hosts`, none started yet; none is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "headrace.toml").exists():
        (folder / "headrace.toml").write_text(SETTINGS.format(url=server.url), "utf-8")
    parts = [Hosted(folder, *names) for names in hosts]
    try:
        yield parts
    except BaseException:
        for part in parts:
            print(f"--- {part.name}\n{part.tail()}")
        raise
    finally:
        for part in parts:
            part.kill()
