"""The demo's steps: a mesh as a child, the submit, the watch, the audit, and everything ended again."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from headrace.cli.demo_mesh import DemoMesh
from headrace.cli.demo_report import Report, pick_samples, print_report, read_prompts
from headrace.cli.exit_codes import Exit
from headrace.cli.output import print_json, say
from headrace.cli.status import job_audit
from headrace.cli.submitting import SubmitProgress, submit_file
from headrace.cli.supervisor.choices import engine_choice
from headrace.cli.target import connect, find_settings, run_async
from headrace.cli.up import known_engine
from headrace.cli.watch_view import WatchView
from headrace.cli.watching import exit_of, follow
from headrace.contracts.errors import InvalidInput
from headrace.mesh.settings import Settings

KEPT_FOLDER = Path(".headrace-demo")


class DemoOptions(Struct, frozen=True, kw_only=True):
    """What `headrace demo` was asked for."""

    engine: str
    model: str | None = None
    prompts: Path | None = None
    folder: Path | None = None
    keep: bool = False
    timeout_s: float = 900.0
    as_json: bool = False


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return its exit code. Nothing that it started is left running, whatever happens."""
    # A stop from outside unwinds like Ctrl-C: the mesh is drained and the temporary folder removed.
    signal.signal(signal.SIGTERM, _as_interrupt)
    known_engine(options.engine)
    prompts = find_prompts(options.prompts)
    with _folder(options) as folder:
        engine_choice(options.engine, folder)
        say(f"demo: a mesh in {folder}, engine {options.engine}, prompts {prompts}")
        with DemoMesh(folder, engine=options.engine, model=options.model) as mesh:
            settings = find_settings(folder, mesh.url)
            report = run_async(_work(settings, prompts, options))
        if options.as_json:
            print_json(report.summary())
        else:
            print_report(report, kept=folder if _is_kept(options) else None)
    return int(report.exit)


async def _work(settings: Settings, prompts: Path, options: DemoOptions) -> Report:
    job = time.strftime("demo-%Y%m%d-%H%M%S")
    began = time.monotonic()
    async with await connect(settings) as mesh:
        with SubmitProgress(wanted=None) as shown:
            receipt = await submit_file(mesh, str(prompts), job=job, on_progress=shown)
        say(f"submitted {receipt.submitted:,} prompts as job {job}")
        with WatchView() as view:
            ended = await follow(mesh, job, show=view.show, trouble=view.note, timeout_s=options.timeout_s)
        seconds = time.monotonic() - began
        audit = await job_audit(mesh, job)
        samples = await pick_samples(mesh, job, read_prompts(prompts))
    code = Exit.TIMED_OUT if ended is None else exit_of(ended)
    if code is Exit.OK and not audit.balanced:
        code = Exit.FAILED
    return Report(audit=audit, seconds=seconds, samples=samples, exit=code)


def _as_interrupt(_number: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


def find_prompts(given: Path | None) -> Path:
    """The input: as given, else examples/prompts.jsonl of the checkout or of the installed package."""
    if given is not None:
        if not given.is_file():
            raise InvalidInput(f"no such file: {given}", field="prompts")
        return given
    import headrace

    roots = [Path(entry) for entry in headrace.__path__]
    for path in (
        *(root / "examples" for root in roots),
        *(root.parent.parent / "examples" for root in roots),
    ):
        if (path / "prompts.jsonl").is_file():
            return path / "prompts.jsonl"
    raise InvalidInput(
        "this installation has no examples/prompts.jsonl: take it from the repository and give --prompts FILE",
        field="prompts",
    )


def _is_kept(options: DemoOptions) -> bool:
    return options.keep or options.folder is not None


@contextmanager
def _folder(options: DemoOptions) -> Generator[Path]:
    if options.folder is not None or options.keep:
        yield (options.folder or KEPT_FOLDER).absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
