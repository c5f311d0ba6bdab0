"""One `headrace up` from its options to its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from msgspec import Struct

from headrace.cli.exit_codes import Exit
from headrace.cli.output import print_line, say
from headrace.cli.supervisor.choices import engine_choice, model_choice
from headrace.cli.supervisor.layout import Layout, MeshState, choose_port, read_state
from headrace.cli.supervisor.lock import DirLock
from headrace.cli.supervisor.plan import Plan
from headrace.cli.supervisor.supervisor import Supervisor
from headrace.contracts.errors import Conflict, NotFound
from headrace.mesh.settings import Settings, load_settings, mesh_dir

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UpOptions(Struct, frozen=True, kw_only=True):
    """What `headrace up` was asked for; None where it was not said."""

    folder: Path | None = None
    engine: str | None = None
    model: str | None = None
    workers: int = 1
    gateways: int = 1
    port: int | None = None
    durability: str | None = None
    function: str | None = None
    slots: int | None = None
    context: int | None = None
    threads: int | None = None
    engine_options: list[str] = []
    grace_s: float | None = None
    ready_timeout_s: float = 300.0
    functions: str = ""


def run_foreground(options: UpOptions) -> int:
    """Run a mesh until a signal ends it; return the exit code.

    Raise `Conflict` (the folder is in use), `Refused` (the port is), `InvalidInput` (a setting, a missing
    package), `Unavailable` (something did not start: what had started is stopped again).
    """
    layout = Layout(mesh_dir(options.folder))
    layout.create()
    lock = DirLock(layout.folder)
    lock.acquire()
    try:
        plan, writing_end = _make_plan(options, layout)
        try:
            return asyncio.run(_run(plan, options))
        finally:
            os.close(writing_end)
            os.close(plan.lifeline)
    finally:
        lock.release()


def _make_plan(options: UpOptions, layout: Layout) -> tuple[Plan, int]:
    if options.functions:
        # Before anything is started: a module that is not there would end its worker again and again.
        from headrace.inference_worker.functions import check_functions

        check_functions(options.functions)
    engine = engine_choice(options.engine, layout.folder)
    model = model_choice(engine, options.model, layout.folder)
    port = choose_port(layout, options.port)
    # What was said here goes to the workers as flags; the rest each service reads from the folder's own file.
    said: dict[str, object] = {
        "engine": engine,
        "model": model,
        "function": options.function,
        "slots": options.slots,
        "context": options.context,
        "threads": options.threads,
    }
    settings = load_settings(
        options.folder,
        {
            "url": f"nats://127.0.0.1:{port}",
            "durability": options.durability,
            "grace_s": options.grace_s,
            **{f"worker.{name}": value for name, value in said.items()},
        },
    )
    flags = [text for name, value in said.items() if value is not None for text in (f"--{name}", str(value))]
    flags += [text for option in options.engine_options for text in ("--engine-option", option)]
    reading_end, writing_end = os.pipe()
    plan = Plan(
        layout=layout,
        settings=settings,
        port=port,
        workers=options.workers,
        gateways=options.gateways,
        lifeline=reading_end,
        worker_flags=tuple(flags),
        functions=options.functions,
    )
    return plan, writing_end


async def _run(plan: Plan, options: UpOptions) -> int:
    last, state = read_state(plan.layout.folder), _state_of(plan)
    other_workers = last is not None and last.worker_flags != state.worker_flags

    def changed(pids: dict[str, int]) -> None:
        state.pids = pids
        plan.layout.write_state(state)

    supervisor = Supervisor(say=say, changed=changed, ready_timeout_s=options.ready_timeout_s)
    _handle_signals(supervisor)
    try:
        await _start(supervisor, plan, other_workers=other_workers)
        if not supervisor.stopping.is_set():
            _announce(plan, state)
            await supervisor.stopping.wait()
            say("stopping: workers, gateway, completion, broker (again to end at once)")
    finally:
        clean = await supervisor.stop(plan.stop_order())
        state.pid, state.pids = 0, {}
        plan.layout.write_state(state)
    say("stopped" if clean else "stopped, not all of it in good order: what was acknowledged is stored")
    return int(Exit.OK if clean else Exit.FAILED)


def _state_of(plan: Plan) -> MeshState:
    s = plan.settings
    return MeshState(
        url=s.url,
        port=plan.port,
        durability=s.durability,
        engine=s.worker.engine,
        function=s.worker.function,
        model=s.worker.model,
        worker_flags=list(plan.worker_flags),
        pid=os.getpid(),
    )


async def _start(supervisor: Supervisor, plan: Plan, *, other_workers: bool) -> None:
    """Broker, streams, completion and gateway, workers: each when the one before is ready."""
    await supervisor.start([plan.server()])
    if supervisor.stopping.is_set():
        return
    await _provision(plan.settings, other_workers=other_workers)
    await supervisor.start(plan.readers())
    if supervisor.stopping.is_set():
        return
    say(f"starting {plan.workers} worker(s) with engine {plan.settings.worker.engine}")
    await supervisor.start(plan.worker_specs())


async def _provision(settings: Settings, *, other_workers: bool) -> None:
    """Make the streams; where the workers are others than last time, let go of what the last ones registered.

    While tasks wait for the function it stays as it is: they were made for its model.
    """
    from headrace.mesh.connection import Mesh
    from headrace.mesh.provision import provision, unregister_function

    async with await Mesh.connect(settings, name="up") as mesh:
        await provision(mesh)
        if not other_workers:
            return
        try:
            await unregister_function(mesh, settings.worker.function)
        except NotFound:
            return
        except Conflict as e:
            say(f"note: {e}")


def _handle_signals(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if supervisor.stopping.is_set():
            supervisor.kill()
        supervisor.stopping.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)


def _announce(plan: Plan, state: MeshState) -> None:
    folder = plan.layout.folder
    model = f" ({state.model})" if state.model else ""
    lines = [
        f"folder      {folder}",
        f"broker      {state.url}  (store {plan.layout.nats}, durability {state.durability})",
        f"data plane  {plan.settings.completion.database or plan.layout.database}",
        f"logs        {plan.layout.logs}",
        f"workers     {plan.workers} × {state.engine}{model}, function {state.function}",
        *([f"functions   {plan.functions}"] if plan.functions else []),
        f"processes   {', '.join(f'{name} {pid}' for name, pid in state.pids.items())}",
        f"ready {state.url}",
    ]
    try:
        print_line("\n".join(lines))
    except OSError:
        sys.stdout = sys.__stderr__  # nobody reads: that is no reason to stop
