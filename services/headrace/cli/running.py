"""What `headrace run` does: which function is meant, a run in this process, or a submit."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headrace.cli.output import say
from headrace.cli.submitting import SubmitProgress
from headrace.cli.target import connect, run_async
from headrace.contracts.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from headrace.client.checking import Checked
    from headrace.client.formats import Form
    from headrace.client.inputs import Input
    from headrace.client.submit import Receipt
    from headrace.contracts.messages import FunctionSpec, Result
    from headrace.forge.function import Function
    from headrace.forge.local import Runner, Tally
    from headrace.forge.plans import Plan
    from headrace.forge.source import Asked
    from headrace.mesh.connection import Mesh
    from headrace.mesh.settings import Settings

LINE_EVERY_S = 2.0


class Work(NamedTuple):
    """A function and how it is run. `function` is None for those that are an engine's: `generate`, `classify`."""

    name: str
    function: Function[..., Any] | None
    plan: Plan
    form: Form


def resolve(asked: Asked, settings: Settings) -> Work:
    """What is meant; raise `NotFound` or `InvalidInput` naming the function or the setting."""
    from headrace.forge.batching import parse_batching
    from headrace.forge.locate import find_function
    from headrace.forge.plans import plan_of
    from headrace.inference_worker.local import ENGINE_FUNCTIONS, engine_plan

    if asked.batching is not None:
        parse_batching(asked.batching)
    if asked.target in ENGINE_FUNCTIONS:
        plan = engine_plan(asked.target, settings, flag=asked.batching)
        return Work(asked.target, None, plan, "lines" if asked.target == "generate" else "rows")
    function = find_function(asked.target)
    return Work(
        function.name, function, plan_of(function, settings, serving=False, flag=asked.batching), "rows"
    )


# --- here ------------------------------------------------------------------------------------------


def run_here(
    asked: Asked, work: Work, settings: Settings, *, out: Path | None, progress: bool | None
) -> tuple[Checked, Tally]:
    """Check all lines, run them, write their results; raise `InvalidLines` before any is run."""
    from headrace.client.inputs import open_input

    rows = work.form == "rows"
    with open_input(
        asked.file,
        input_format=asked.input_format,
        column=asked.column,
        id_column=asked.id_column,
        whole_rows=rows,
    ) as lines:
        return run_async(_here(asked, settings, work, lines, out, RunProgress(wanted=progress)))


async def _here(
    asked: Asked, settings: Settings, work: Work, lines: Input, out: Path | None, shown: RunProgress
) -> tuple[Checked, Tally]:
    from headrace.client.writers import make_writer, opened_output
    from headrace.forge.local import run_local
    from headrace.forge.source import LocalSource

    with shown:
        runner = _runner(work, settings, asked.job or "local")
        # The model first, where there is one: it says how long a prompt may be.
        needs_spec = work.function is None
        try:
            if needs_spec:
                await runner.start()
            source = LocalSource(lines, _spec(work, runner), settings, form=work.form)
            checked = await asyncio.to_thread(
                source.check, skip_bad=asked.skip_bad, progress=lambda _read, _ok: None
            )
            shown.total = checked.accepted
            if not needs_spec:
                await runner.start()
            with opened_output(out or "-") as file:
                writer = make_writer("jsonl", file)

                def write(results: list[Result]) -> None:
                    writer.write(results)

                tally = await run_local(source.items(checked), runner, work.plan, write, progress=shown)
                lines.check_unchanged()
                writer.close()
        finally:
            await runner.stop()
    return checked, tally


def _runner(work: Work, settings: Settings, job: str) -> Runner:
    if work.function is None:
        from headrace.inference_worker.local import EngineRunner

        return EngineRunner(work.name, settings, job=job)
    from headrace.forge.local import FunctionRunner

    return FunctionRunner(work.function, work.plan, job=job)


def _spec(work: Work, runner: Runner) -> FunctionSpec:
    from headrace.forge.plans import spec_of
    from headrace.inference_worker.local import EngineRunner

    if isinstance(runner, EngineRunner):
        return runner.spec
    if work.function is None:
        raise AssertionError("a function without an engine is a Function")
    return spec_of(work.function)


class RunProgress:
    """Rows done, on standard error: a bar on a terminal, now and then a line if wanted elsewhere."""

    def __init__(self, *, wanted: bool | None) -> None:
        self.total = 0
        self._live = sys.stderr.isatty() and wanted is not False
        self._lines = bool(wanted) and not self._live
        self._bars: Any = None
        self._task: Any = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            from headrace.cli.output import console

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, tally: Tally) -> None:
        """One reading."""
        if self._bars is not None:
            if self._task is None:
                self._task = self._bars.add_task("rows", total=self.total)
            self._bars.update(self._task, completed=tally.rows)
        elif self._lines and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            say(f"running: {tally.rows:,} of {self.total:,} rows, {tally.failed:,} failed")


# --- by the mesh -----------------------------------------------------------------------------------


async def submit_rows(asked: Asked, work: Work, settings: Settings, *, progress: bool | None) -> Receipt:
    """Store the rows as a job; the function is registered if no worker has done so yet."""
    from headrace.client.submit import SubmitOptions, submit
    from headrace.mesh import tracing

    options = SubmitOptions(
        function=work.name,
        lane=asked.lane,
        form=work.form,
        input_format=asked.input_format,
        column=asked.column,
        id_column=asked.id_column,
        skip_bad=asked.skip_bad,
    )
    tracing.setup_tracing("submit")
    try:
        async with await connect(settings, name="run") as mesh:
            await _register(mesh, work)
            with SubmitProgress(wanted=progress) as shown:
                return await submit(mesh, asked.file, job=asked.job, options=options, on_progress=shown)
    finally:
        tracing.shutdown_tracing()


async def _register(mesh: Mesh, work: Work) -> None:
    """Whoever has the function at hand may register it, so that rows can be stored before any worker has begun."""
    from headrace.forge.plans import spec_of
    from headrace.mesh.provision import get_function, register_function

    try:
        known = await get_function(mesh, work.name)
    except NotFound:
        if work.function is None:
            raise
        await register_function(mesh, spec_of(work.function))
        return
    if work.function is None:
        return
    ours = spec_of(work.function)
    if (known.engine, known.model.rpartition("@")[0]) != (ours.engine, ours.model.rpartition("@")[0]):
        msg = (
            f"function {work.name!r} is registered as {known.engine} {known.model}, and {ours.model} is another one: "
            "give it a name of its own, @function(name=...)"
        )
        raise InvalidInput(msg, field="function", code="other_function")
    if known.version != ours.version:
        say(f"note: workers serve {work.name} in version {known.version}; here it has version {ours.version}")
