"""`headrace run`: a function over the rows of a file, here and now or by the mesh, as its batching says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, IdColumn, InputFormat, Json, Lane, Progress, SkipBad, Url
from headrace.cli.output import print_json, print_line, say
from headrace.cli.running import resolve, run_here, submit_rows
from headrace.cli.submit import FORMATS, print_errors
from headrace.cli.target import find_settings, run_async
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import Lane as LaneName
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.client.submit import Receipt
    from headrace.forge.local import Tally
    from headrace.forge.source import Asked


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="pkg.mod:function (the current folder is on the path), or embed, classify, generate.",
            show_default=False,
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines (gzip too), CSV or Parquet; - is standard input.", show_default=False
        ),
    ],
    *,
    batching: Annotated[
        str | None,
        typer.Option(
            "--batching",
            help="rows:N or tokens:BUDGET run here; submit stores the rows for workers and exits "
            "[default: as configured, as the function says, else rows:64].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File for the results, whole or not at all [default: standard output].",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", help="submit: name of the job; the same name resumes it.", show_default=False),
    ] = None,
    skip_bad: SkipBad = False,
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            help="CSV, Parquet: the column of prompts [default: rows have all].",
            show_default=False,
        ),
    ] = None,
    id_column: IdColumn = None,
    input_format: InputFormat = "auto",
    lane: Lane = "normal",
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="What a row counts against a budget: estimate, length or tokenizer:PATH.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", help="How a budget packs: free or ordered.", show_default=False),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=0, help="Processes that run it here; 0: one a core.", show_default=False
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="generate, classify: the engine that runs here.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="generate, classify: the engine's model.", show_default=False),
    ] = None,
    progress: Progress = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run FUNCTION over the rows of FILE: each line, or table row, is one row.

    rows:N and tokens:BUDGET run here, without a broker, and write results in the form of `headrace results`; submit
    stores the rows as a job and exits at once, and `headrace worker --functions` runs them. The results are the same.

    Exit code 0 if every row is ok (submit: stored), 3 if some failed, 2 for bad lines: none is run then, unless
    --skip-bad. With --json the last line on standard output is a summary (submit: the receipt).
    """
    from headrace.client.problems import InvalidLines
    from headrace.forge.source import Asked

    if input_format not in FORMATS:
        raise InvalidInput(
            f"format {input_format[:80]!r} is unknown: use one of {', '.join(FORMATS)}", field="format"
        )
    if lane not in list(LaneName):
        raise InvalidInput(f"lane {lane[:80]!r} is unknown: use one of {', '.join(LaneName)}", field="lane")
    if job is not None:
        check_token("job", job)
    asked = Asked(
        target=target,
        file=file,
        batching=batching,
        input_format=input_format,
        column=column,
        id_column=id_column,
        skip_bad=skip_bad,
        lane=LaneName(lane),
        job=job,
    )
    flags: dict[str, object] = {"forge.size": size, "forge.order": order, "forge.processes": processes}
    flags |= {"worker.engine": engine, "worker.model": model}
    try:
        code = _run(asked, folder, url, flags, out=out, progress=progress, as_json=json)
    except InvalidLines as e:
        print_errors(e.errors, e.total, as_json=json, to_stdout=json)
        if not json:
            say(
                f"error: {e.total:,} bad {'lines' if e.total > 1 else 'line'}, nothing was run; --skip-bad goes without"
            )
        raise typer.Exit(Exit.INVALID) from None
    raise typer.Exit(code)


def _run(
    asked: Asked,
    folder: Path | None,
    url: str | None,
    flags: dict[str, Any],
    *,
    out: Path | None,
    progress: bool | None,
    as_json: bool,
) -> Exit:
    from headrace.forge.plans import flags_first
    from headrace.mesh.settings import load_settings

    settings = flags_first(load_settings(folder, flags, need_url=False), flags)
    work = resolve(asked, settings)
    if work.plan.batching.mode == "submit":
        if out is not None:
            name = asked.job or "JOB"
            msg = f"--out is for what runs here; this lands in the mesh: headrace results {name} --out {out}"
            raise InvalidInput(msg, field="out")
        receipt = run_async(submit_rows(asked, work, find_settings(folder, url, flags), progress=progress))
        _print_receipt(receipt, work.name, as_json=as_json)
        return Exit.OK
    checked, tally = run_here(asked, work, settings, out=out, progress=progress)
    for note in checked.notes:
        say(f"note: {note}")
    if checked.refused:
        print_errors(checked.errors, checked.refused, as_json=as_json, to_stdout=False)
    _print_tally(
        tally, work.name, str(work.plan.batching), checked.refused, out, as_json=as_json, job=asked.job
    )
    return Exit.ITEMS_FAILED if tally.failed else Exit.OK


def _print_tally(
    tally: Tally, name: str, batching: str, refused: int, out: Path | None, *, as_json: bool, job: str | None
) -> None:
    if as_json:
        print_json(
            {
                "function": name,
                "batching": batching,
                "job": job,
                "rows": tally.rows,
                "ok": tally.ok,
                "failed": tally.failed,
                "refused": refused,
                "batches": tally.batches,
                "seconds": round(tally.seconds, 3),
                "out": None if out is None else str(out),
            }
        )
        return
    text = f"{name} {batching}: {tally.ok:,} of {tally.rows:,} rows ok, {tally.failed:,} failed, "
    text += f"{tally.batches:,} batches, {tally.seconds:.1f} s" + (
        f", in {out}" if out is not None and str(out) != "-" else ""
    )
    # Rows and nothing else go to standard output, where no file was named.
    (say if out is None or str(out) == "-" else print_line)(text)


def _print_receipt(receipt: Receipt, function: str, *, as_json: bool) -> None:
    for note in receipt.notes:
        say(f"note: {note}")
    if receipt.refused:
        print_errors(receipt.errors, receipt.refused, as_json=as_json, to_stdout=False)
    if as_json:
        keys = ("job", "submitted", "refused", "resumed_from")
        print_json(
            {"function": function, "batching": "submit", **{key: getattr(receipt, key) for key in keys}}
        )
        return
    resumed = f", {receipt.resumed_from:,} of them by an earlier run" if receipt.resumed_from else ""
    refused = f", {receipt.refused:,} lines refused" if receipt.refused else ""
    print_line(f"job {receipt.job}: {receipt.submitted:,} rows stored for {function}{resumed}{refused}")
    say(f"its results, once a worker serves {function}: headrace results {receipt.job}")
