"""The command's side of a submit: options as the client takes them, and progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from headrace.cli.output import console, say
from headrace.contracts.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from headrace.client.submit import Progress, Receipt, SubmitOptions
    from headrace.mesh.connection import Mesh

LINE_EVERY_S = 2.0


async def submit_file(
    mesh: Mesh,
    file: str,
    *,
    job: str,
    options: SubmitOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    model: str | None = None,
) -> Receipt:
    """Store the lines of `file` (`-`: standard input) as `job`.

    Raise what the client raises, and `Conflict` if the function does not run `model`, where one is asked for.
    """
    from headrace.client.submit import SubmitOptions, submit
    from headrace.mesh.provision import get_function

    options = options or SubmitOptions()
    if model is not None:
        known = await get_function(mesh, options.function)
        if model not in {known.model, Path(known.model).name, Path(known.model).stem}:
            raise Conflict(
                f"function {options.function} runs model {known.model or 'none'}, not {model}",
                code="other_model",
            )
    return await submit(mesh, file, job=job, options=options, on_progress=on_progress)


def read_defaults(pairs: list[str] | None) -> dict[str, Any]:
    """Generation parameters given as NAME=VALUE, the values as JSON or, failing that, as text."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{pair[:200]!r} is not NAME=VALUE", field="default")
        try:
            found[name] = msgspec.json.decode(text)
        except msgspec.MsgspecError:
            found[name] = text
    return found


class SubmitProgress:
    """Shows a submit on standard error: bars on a terminal, now and then a line elsewhere, nothing if not wanted.

    `stored` is what was last heard, for who interrupts it.
    """

    def __init__(self, *, wanted: bool | None) -> None:
        self.stored = 0
        self.items = 0
        self._live = sys.stderr.isatty() and wanted is not False
        self._lines = bool(wanted) and not self._live
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._waiting = ""
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._live:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bars = Bars(*columns, console=console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """One reading; may come from another thread."""
        if progress.phase in {"storing", "sealed"}:
            self.stored, self.items = progress.stored, progress.items
        if progress.waiting and progress.waiting != self._waiting:
            self._note(f"waiting: {progress.waiting}")
        self._waiting = progress.waiting
        storing = progress.phase in {"storing", "sealed"}
        done, total = (
            (progress.stored, progress.items) if storing else (progress.bytes_read, progress.total_bytes)
        )
        if self._bars is not None:
            self._draw(self._bars, progress.phase, done, total)
        elif self._lines and (progress.phase != self._phase or time.monotonic() >= self._next_line):
            self._phase = progress.phase
            self._next_line = time.monotonic() + LINE_EVERY_S
            say(f"{progress.phase}: {done:,} of {total:,} {'items' if storing else 'bytes'}")

    def _draw(self, bars: Bars, phase: str, done: int, total: int) -> None:
        if self._task is None or phase != self._phase:
            if self._task is not None:
                bars.remove_task(self._task)
            self._task, self._phase = bars.add_task(phase, total=total or None), phase
        bars.update(self._task, completed=done, total=total or None)

    def _note(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False)
        else:
            say(text)
