"""One run from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from headrace.cli.chaos_kit.conductor import Conductor
from headrace.cli.chaos_kit.faults import Done, Faults
from headrace.cli.chaos_kit.load import Load, Source, prepare
from headrace.cli.chaos_kit.local import LocalMesh, LocalOptions, check_folder, forget_environment
from headrace.cli.chaos_kit.pace import SLOTS, engine_flags, queue_bound
from headrace.cli.chaos_kit.plan import BROKER, COMPLETION, SUBMIT, Fault, even_kills, make_plan
from headrace.cli.chaos_kit.report import Report, print_report
from headrace.cli.chaos_kit.sampler import EVERY_S, Sampler
from headrace.cli.chaos_kit.streams import Streams
from headrace.cli.chaos_kit.submitter import Submitter
from headrace.cli.chaos_kit.verdict import judge
from headrace.cli.chaos_kit.view import ChaosView
from headrace.cli.exit_codes import Exit
from headrace.cli.output import print_json, say
from headrace.cli.supervisor.choices import engine_choice, model_choice
from headrace.cli.target import run_async
from headrace.mesh.connection import Mesh

JOB: Final = "chaos"
SECONDS_A_KILL: Final = 6.0
"""Each component is killed about this often, unless it is said how often …"""
LEAST_KILLS: Final = 10
LEAST_SECONDS_A_KILL: Final = 3.0
"""… and this many times at least, if there is time for that."""
READY_S: Final = 60.0

Pids = Callable[[dict[str, int]], None]


class ChaosOptions(Struct, frozen=True, kw_only=True):
    """What `headrace chaos` was asked for."""

    source: Source
    seconds: float = 60.0
    seed: int | None = None
    items: int | None = None
    kills: int | None = None
    engine: str = "sim"
    model: str | None = None
    workers: int = 2
    function: str = "generate"
    slots: int | None = None
    engine_options: list[str] = []
    durability: Literal["safe", "relaxed"] | None = None
    ack_wait_s: float = 3.0
    patience_s: float = 120.0
    folder: Path | None = None
    keep: bool = False
    as_json: bool = False


def run_chaos(options: ChaosOptions) -> int:
    """Run it; return the exit code. Nothing that it started is left running, whatever happens."""
    # A stop from outside unwinds like Ctrl-C: what is paused is woken, the mesh drained, the folder removed.
    signal.signal(signal.SIGTERM, _as_interrupt)
    forget_environment()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    if options.folder is not None:
        check_folder(options.folder)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    keep = options.keep or options.folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _log_to(folder / "chaos.log")
        report = run_async(_run(options, folder, seed))
        keep = keep or bool(report.problems())
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.as_json:
        print_json(report.summary())
    else:
        print_report(report)
    if keep:
        say(f"kept in {folder}: logs in {folder / 'logs'}; `headrace up --dir {folder}` runs this mesh again")
    return int(Exit.FAILED if report.problems() else Exit.OK)


async def _run(options: ChaosOptions, folder: Path, seed: int) -> Report:
    load = prepare(options.source, folder / "input.jsonl", items=options.items)
    mesh = local_options(options, load, folder)
    kills = options.kills if options.kills is not None else kills_in(options.seconds)
    plan = make_plan(seed, even_kills(kills), workers=options.workers, ack_wait_s=options.ack_wait_s)
    say(
        f"seed {seed}: {len(plan)} faults in {options.seconds:g} s on {load.items:,} items, engine {mesh.engine} in "
        f"{options.workers} workers ({' '.join(mesh.engine_options) or 'its own pace'}), folder {folder}"
    )
    with ChaosView(load.items) as view:
        return await drive(
            load,
            mesh,
            plan,
            folder=folder,
            seed=seed,
            seconds=options.seconds,
            patience_s=options.patience_s,
            view=view,
        )


def kills_in(seconds: float) -> int:
    """SIGKILLs of each component in a run of so many seconds, unless it is said how many."""
    unhurried, at_most = int(seconds / SECONDS_A_KILL), int(seconds / LEAST_SECONDS_A_KILL)
    return max(1, unhurried, min(LEAST_KILLS, at_most))


def local_options(options: ChaosOptions, load: Load, folder: Path) -> LocalOptions:
    """The mesh for this load: its queue smaller than the job, its engine no faster than the faults."""
    engine = engine_choice(options.engine, folder)
    own, paced = options.engine_options, list[str]()
    if not own:
        paced = engine_flags(
            engine, load, seconds=options.seconds, workers=options.workers, slots=options.slots
        )
    return LocalOptions(
        engine=engine,
        model=model_choice(engine, options.model, folder),
        workers=options.workers,
        function=options.function,
        slots=options.slots or (SLOTS if paced else None),
        engine_options=own or paced,
        durability=options.durability,
        ack_wait_s=options.ack_wait_s,
        max_bytes=queue_bound(load),
    )


async def drive(
    load: Load,
    options: LocalOptions,
    plan: Sequence[Fault],
    *,
    folder: Path,
    seed: int,
    seconds: float,
    patience_s: float,
    view: ChaosView,
    pids: Pids | None = None,
    sample_every_s: float = EVERY_S,
) -> Report:
    """Run `load` on a mesh of its own while `plan` is carried out, heal what is left of it, and prove the end.

    The job is given `patience_s` after the faults. `pids` hears of each process that starts or ends.
    """
    observe = pids or _nobody
    async with (
        LocalMesh(folder, options, pids=observe) as local,
        await Mesh.connect(local.settings, name="chaos") as mesh,
    ):
        submitter = Submitter(
            local, load, JOB, patience_s=seconds + patience_s, pids=lambda pid: observe({SUBMIT: pid})
        )
        sampler = Sampler(mesh, JOB, show=view.sample, every_s=sample_every_s)
        streams = Streams(mesh, JOB)

        def said(done: Done) -> None:
            view.fault(done)
            if done.fault == "kill" and done.victim in {BROKER, COMPLETION}:
                sampler.abandon()

        faults = Faults(local, streams, submitter, said=said)
        view.begin()
        began = time.monotonic()
        async with _beside(sampler.run()) as sampling, _beside(submitter.run()) as submitting:
            beside = (sampling, submitting)
            conductor = Conductor(faults, sampler, seconds=seconds, items=load.items)
            await _unless(beside, conductor.run(plan))
            await streams.restore()
            view.note(f"{time.monotonic() - began:>7.2f} s  the faults are over: {len(faults.done)}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await _unless(beside, sampler.ended.wait())
        took = time.monotonic() - began
        not_back = await local.all_ready(timeout_s=READY_S)
        verdict = await judge(
            mesh,
            JOB,
            load,
            engine=options.engine,
            submitted=submitter.finished.is_set(),
            patience_s=min(patience_s, 30.0),
        )
        return Report(
            seed=seed,
            seconds=took,
            verdict=verdict,
            audit=await sampler.final(timeout_s=30.0),
            balanced_samples=sampler.balanced,
            unbalanced=sampler.unbalanced,
            unanswered_samples=sampler.unanswered,
            faults=faults.done,
            submits=submitter.runs,
            left_out=faults.left_out,
            not_back=not_back,
        )


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[asyncio.Task[None]]:
    """Run `work` while the block lasts; then end it. What it raised is raised."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _unless(beside: Collection[asyncio.Task[None]], work: Coroutine[Any, Any, Any]) -> None:
    """Await `work`, and give it up if one of the tasks beside it fails meanwhile."""
    task = asyncio.create_task(work)
    watched = set(beside)
    try:
        while not task.done():
            done, _ = await asyncio.wait({task, *watched}, return_when=asyncio.FIRST_COMPLETED)
            for other in watched & done:
                other.result()
            watched -= done
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _nobody(_pids: dict[str, int]) -> None:
    """Wants to know which processes run."""


def _log_to(path: Path) -> None:
    """What our own connection says of a broker that dies belongs beside the other logs, not among the faults."""
    logger = logging.getLogger("headrace")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _as_interrupt(_number: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGINT)
