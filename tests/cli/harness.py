"""A real `headrace up` as a subprocess, and the command run against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

HEADRACE = [sys.executable, str(Path(sys.executable).parent / "headrace")]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without settings of ours, so that nobody's shell decides a test."""
    return {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")} | more


def headrace(
    *arguments: str,
    cwd: Path | None = None,
    timeout: float = 60,
    stdin: str | None = None,
    **environment: str,
):
    """Run one command to its end; stdout and stderr as text."""
    return subprocess.run(
        [*HEADRACE, *arguments],
        cwd=cwd,
        env=clean_environment(**environment),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def write_prompts(path: Path, count: int, *, prefix: str = "say") -> Path:
    """`count` plain lines with a prompt each."""
    path.write_text(
        "".join(json.dumps({"prompt": f"{prefix} {i}", "max_tokens": 8}) + "\n" for i in range(count))
    )
    return path


class Reader(threading.Thread):
    """Collects the lines of a stream, and waits for one."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.ended = False
        self._stream = stream
        self._changed = threading.Condition()
        self.start()

    def run(self):
        for line in self._stream:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait_for(self, *parts: str, after: int = 0, timeout: float = 60) -> str:
        """The first line from number `after` on that has all `parts`; fails if the stream ends before."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self.lines[after:]:
                    if all(part in line for part in parts):
                        return line
                left = deadline - time.monotonic()
                assert left > 0, f"no line with {parts} within {timeout} s:\n" + "\n".join(self.lines)
                assert not self.ended, f"ended without a line with {parts}:\n" + "\n".join(self.lines)
                self._changed.wait(left)


class Up:
    """`headrace up` in `folder`, ready when the constructor returns."""

    def __init__(self, folder: Path, *flags: str, engine: str = "echo", durability: str = "relaxed"):
        self.folder = folder
        command = [
            *HEADRACE,
            "up",
            "--dir",
            str(folder),
            "--engine",
            engine,
            "--durability",
            durability,
            *flags,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        self.out, self.err = Reader(self.process.stdout), Reader(self.process.stderr)
        self.tree: list[psutil.Process] = []
        try:
            self.url = self.out.wait_for("ready nats://").removeprefix("ready ")
        except AssertionError as e:
            self.kill()
            raise AssertionError(f"{e}\n" + "\n".join(self.err.lines)) from None
        self.remember_processes()

    @property
    def state(self) -> dict:
        """`mesh.json`."""
        return json.loads((self.folder / "mesh.json").read_text())

    def pid(self, name: str) -> int:
        """Process id of a service."""
        return self.state["pids"][name]

    def remember_processes(self):
        """Note every process under this one, to see later that none is left."""
        self.tree += psutil.Process(self.process.pid).children(recursive=True)

    def run(self, *arguments: str, timeout: float = 60, stdin: str | None = None, **environment: str):
        """One command against this mesh."""
        return headrace(*arguments, "--dir", str(self.folder), timeout=timeout, stdin=stdin, **environment)

    def json(self, *arguments: str, timeout: float = 60):
        """The decoded answer of a command that must succeed."""
        done = self.run(*arguments, "--json", timeout=timeout)
        assert done.returncode == 0, (arguments, done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def kill_service(self, name: str):
        """SIGKILL a service, and wait until it is said to be back."""
        seen = len(self.err.lines)
        os.kill(self.pid(name), signal.SIGKILL)
        ended = self.err.wait_for(f"{name} ended", after=seen)
        back = self.err.wait_for(f"{name} is back", after=seen)
        self.remember_processes()
        return ended, back

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.remember_processes()
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def leftovers(self, timeout: float = 15) -> list[psutil.Process]:
        """Processes of this mesh that still run."""
        _, alive = psutil.wait_procs(self.tree, timeout=timeout)
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def kill(self):
        """End it at once, by the second signal and then by force."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
