"""The supervisor with small processes of its own: start in stages, restart, drain, no leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.cli.supervisor import tether
from headrace.cli.supervisor.backoff import Backoff
from headrace.cli.supervisor.child import Child, ChildSpec, how_it_ended
from headrace.cli.supervisor.supervisor import Supervisor
from headrace.contracts.errors import Unavailable

pytestmark = pytest.mark.anyio

READY = """
import os, pathlib, signal, sys, time
pathlib.Path(os.environ["HEADRACE_READY_FILE"]).write_text(str(os.getpid()))
"""
OBEDIENT = (
    READY
    + "signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))\ntime.sleep(600)"
)
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
WITH_CHILD = (
    READY.replace(
        "pathlib.Path",
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\npathlib.Path",
    )
    + "time.sleep(600)"
)


def spec(
    tmp_path: Path, name: str, script: str, *, grace_s: float = 10.0, fd: int | None = None
) -> ChildSpec:
    ready = tmp_path / f"{name}.ready"
    environment = {"HEADRACE_READY_FILE": str(ready)} | ({tether.LIFELINE: str(fd)} if fd is not None else {})
    return ChildSpec(
        name=name,
        command=[sys.executable, "-c", script],
        log=tmp_path / f"{name}.log",
        environment=environment,
        pass_fds=(fd,) if fd is not None else (),
        grace_s=grace_s,
        ready_file=ready,
    )


class Lines:
    """What a supervisor says, with a wait for a line."""

    def __init__(self):
        self.said: list[str] = []
        self._new = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.said.append(line)
        self._new.set()

    async def wait_for(self, part: str, timeout_s: float = 20.0) -> str:
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.said:
                    if part in line:
                        return line
                self._new.clear()
                await self._new.wait()


def make(lines: Lines, states: list[dict[str, int]] | None = None, **more) -> Supervisor:
    changed = (lambda _pids: None) if states is None else states.append
    return Supervisor(say=lines, changed=changed, backoff=lambda: Backoff(first_s=0.02, seed=1), **more)


async def test_a_stage_is_ready_before_the_next_and_a_stop_goes_in_the_order_given(tmp_path):
    lines, states = Lines(), []
    supervisor = make(lines, states)
    await supervisor.start([spec(tmp_path, "server", OBEDIENT)])
    await supervisor.start([spec(tmp_path, "a", OBEDIENT), spec(tmp_path, "b", OBEDIENT)])
    pids = {c.name: c.pid for c in supervisor.children}
    assert states[-1] == pids
    assert set(pids) == {"server", "a", "b"}
    assert await supervisor.stop([["a", "b"], ["server"]])
    assert [set(s) for s in states[-2:]] == [{"server"}, set()]
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert "drained" in (tmp_path / "a.log").read_text()


async def test_what_dies_is_started_again_and_said_in_one_line_each(tmp_path):
    lines = Lines()
    supervisor = make(lines)
    await supervisor.start([spec(tmp_path, "worker-1", OBEDIENT)])
    first = supervisor.children[0].pid
    os.kill(first, signal.SIGKILL)
    assert "killed by SIGKILL" in await lines.wait_for("worker-1 ended")
    await lines.wait_for("worker-1 is back")
    second = supervisor.children[0].pid
    assert second not in {0, first}
    assert len(lines.said) == 2
    assert await supervisor.stop([["worker-1"]])


async def test_a_start_that_fails_says_the_last_words_of_what_failed(tmp_path):
    supervisor = make(Lines())
    broken = "import sys; print('error: model /nowhere.gguf does not exist', file=sys.stderr); sys.exit(2)"
    with pytest.raises(
        Unavailable,
        match=r"worker-1 did not start: model /nowhere\.gguf does not exist \(log: .*worker-1\.log\)",
    ):
        await supervisor.start([spec(tmp_path, "worker-1", broken)])
    assert await supervisor.stop([["worker-1"]])


async def test_a_start_that_takes_too_long_is_an_error(tmp_path):
    supervisor = make(Lines(), ready_timeout_s=0.3)
    with pytest.raises(Unavailable, match=r"was not ready within 0\.3 s"):
        await supervisor.start([spec(tmp_path, "slow", "import time; time.sleep(600)")])
    await supervisor.stop([["slow"]])
    assert supervisor.children[0].pid == 0


async def test_what_ignores_a_stop_is_killed_after_its_grace_and_that_is_said(tmp_path):
    lines = Lines()
    supervisor = make(lines)
    await supervisor.start([spec(tmp_path, "stubborn", STUBBORN, grace_s=0.3)])
    pid = supervisor.children[0].pid
    assert not await supervisor.stop([["stubborn"]])
    assert "stubborn did not stop in 0.3 s: killed" in lines.said[-1]
    assert not psutil.pid_exists(pid)


async def test_a_kill_during_a_stop_ends_it_at_once(tmp_path):
    supervisor = make(Lines())
    await supervisor.start([spec(tmp_path, "stubborn", STUBBORN, grace_s=60)])
    stopping = asyncio.create_task(supervisor.stop([["stubborn"]]))
    await supervisor.stopping.wait()
    began = time.monotonic()
    supervisor.kill()
    assert not await stopping
    assert time.monotonic() - began < 10


async def test_what_a_dead_process_had_started_dies_with_it(tmp_path):
    lines = Lines()
    supervisor = make(lines)
    await supervisor.start([spec(tmp_path, "worker-1", WITH_CHILD)])
    grandchildren = psutil.Process(supervisor.children[0].pid).children()
    assert len(grandchildren) == 1
    os.kill(supervisor.children[0].pid, signal.SIGKILL)
    await lines.wait_for("is back")
    gone, alive = psutil.wait_procs(grandchildren, timeout=10)
    assert gone
    assert not alive
    await supervisor.stop([["worker-1"]])


@pytest.mark.parametrize("how", ["lifeline", "exec"])
async def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, how):
    """A stand-in for the supervisor starts one process each way, and is killed with SIGKILL."""
    attached = "import time, headrace.cli.supervisor.tether as t; t.attach_lifeline(); print(1, flush=1)"
    attached += "; time.sleep(600)"
    child = {
        "lifeline": f"[sys.executable, '-c', {attached!r}]",
        "exec": "[sys.executable, '-I', '-S', tether.__file__, str(os.getpid()), '/bin/sh', '-c', 'echo 1; sleep 600']",
    }[how]
    script = f"""
import os, subprocess, sys, time
from headrace.cli.supervisor import tether
r, w = os.pipe()
environment = {{**os.environ, tether.LIFELINE: str(r)}}
p = subprocess.Popen({child}, pass_fds=(r,), env=environment, start_new_session=True, stdout=subprocess.PIPE)
p.stdout.readline()
print(p.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child_process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([child_process], timeout=15)
    parent.stdout.close()
    assert gone or child_process.status() == psutil.STATUS_ZOMBIE


async def test_last_words_prefer_the_error_line_then_a_json_error_then_the_last_line(tmp_path):
    child = Child(spec(tmp_path, "x", ""))
    assert child.last_words() == ""
    child.spec.log.write_text('{"level":"error","message":"cannot start"}\nbye\n')
    assert child.last_words() == "cannot start"
    child.spec.log.write_text("error: no model\nTraceback\n")
    assert child.last_words() == "no model"
    child.spec.log.write_text("one\ntwo\n\n")
    assert child.last_words() == "two"


def test_how_it_ended():
    assert how_it_ended(2) == "exit code 2"
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(-200) == "killed by signal 200"


def test_backoff_grows_is_bounded_and_starts_over_after_a_stable_life():
    backoff = Backoff(first_s=1, longest_s=8, stable_s=20, seed=3)
    waits = [backoff.after_death(0.1) for _ in range(6)]
    for wait, ceiling in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert ceiling / 2 <= wait <= ceiling
    assert backoff.after_death(30) <= 1
