"""`headrace submit`: store the lines of a file as a job, durably, and exit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exit_codes import Exit
from headrace.cli.options import (
    Column,
    Dir,
    Function,
    IdColumn,
    InputFormat,
    Json,
    Lane,
    Patience,
    Progress,
    SkipBad,
    Url,
)
from headrace.cli.output import print_json, print_line, say
from headrace.cli.submitting import SubmitProgress, read_defaults, submit_file
from headrace.cli.target import connect, find_settings, run_async
from headrace.contracts.errors import HeadraceError, InvalidInput
from headrace.contracts.names import Lane as LaneName
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.client.problems import LineError
    from headrace.client.submit import Receipt, SubmitOptions
    from headrace.mesh.settings import Settings

FORMATS = ("auto", "jsonl", "csv", "parquet")
TOKENISE = ("auto", "client", "worker")
SHOWN_ERRORS = 20


def submit(
    file: Annotated[
        str,
        typer.Argument(
            help="JSONL (OpenAI Batch or plain lines, gzip too), CSV or Parquet; - is standard input.",
            show_default=False,
        ),
    ],
    *,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", help="Name of the job; the same name resumes it [default: a UUIDv7].", show_default=False
        ),
    ] = None,
    function: Function = "generate",
    lane: Lane = "normal",
    skip_bad: SkipBad = False,
    column: Column = None,
    id_column: IdColumn = None,
    input_format: InputFormat = "auto",
    rows: Annotated[
        bool, typer.Option("--rows", help="Each line is any JSON value, for a function that is no model.")
    ] = False,
    default: Annotated[
        list[str] | None,
        typer.Option(
            "--default",
            metavar="NAME=VALUE",
            help="A generation parameter for lines that do not set it; may be repeated.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="Folder of the model's tokenizer: tokenise here.", show_default=False
        ),
    ] = None,
    tokenise: Annotated[
        str,
        typer.Option("--tokenise", help="Where: auto (here if the tokenizer is at hand), client or worker."),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option("--model", help="Refuse unless the function runs this model.", show_default=False),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="End the job then, whatever is left: from now (90s, 2h, 1h30m) or ISO 8601 (UTC without an offset).",
            show_default=False,
        ),
    ] = None,
    max_failed: Annotated[
        str | None,
        typer.Option(
            "--max-failed",
            metavar="SHARE",
            help="End the job once a larger share of what ran failed (5%, 0.05); from 20 items on.",
            show_default=False,
        ),
    ] = None,
    patience: Patience = 60.0,
    progress: Progress = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Store every line of FILE as an item of a job, durably, and exit: workers take it from there.

    Exit code 0 only if every accepted line is stored. Bad lines (2): nothing is stored, and each is named with
    line, field and error, as JSON on standard output with --json; --skip-bad takes the good ones (0). The same
    command again goes on where an earlier one ended, however it ended.
    """
    from headrace.client.jobs import new_job_name
    from headrace.client.problems import InvalidLines

    name = check_token("job", job) if job is not None else new_job_name()
    settings = find_settings(folder, url)
    options = _options(
        function=function, lane=lane, skip_bad=skip_bad, column=column, id_column=id_column, input_format=input_format,
        rows=rows, default=default, tokenizer=tokenizer, tokenise=tokenise, patience=patience,
        deadline=deadline, max_failed=max_failed,
    )  # fmt: skip
    shown = SubmitProgress(wanted=progress)
    resume = f"run it again to go on: headrace submit {file} --job {name}"
    try:
        receipt = run_async(_submit(settings, file, name, options, model, shown))
    except InvalidLines as e:
        print_errors(e.errors, e.total, as_json=json, to_stdout=json)
        if not json:
            lines = "lines" if e.total > 1 else "line"
            say(
                f"error: {e.total:,} bad {lines}, nothing was stored; mend them, or go without them by --skip-bad"
            )
        raise typer.Exit(Exit.INVALID) from None
    except KeyboardInterrupt:
        say(f"interrupted: {shown.stored:,} of {shown.items or '?'} items are stored; {resume}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except HeadraceError as e:
        if shown.items and e.code not in {"job_cancelled", "job_exists"}:
            say(f"{shown.stored:,} of {shown.items:,} items of job {name} are known to be stored; {resume}")
        raise
    _print_receipt(receipt, as_json=json)


async def _submit(
    settings: Settings, file: str, job: str, options: SubmitOptions, model: str | None, shown: SubmitProgress
) -> Receipt:
    from headrace.mesh import tracing

    tracing.setup_tracing("submit")
    try:
        async with await connect(settings, name="submit") as mesh:
            with shown:
                return await submit_file(mesh, file, job=job, options=options, on_progress=shown, model=model)
    finally:
        tracing.shutdown_tracing()


def _options(
    *,
    function: str,
    lane: str,
    skip_bad: bool,
    column: str | None,
    id_column: str | None,
    input_format: str,
    rows: bool,
    default: list[str] | None,
    tokenizer: Path | None,
    tokenise: str,
    patience: float,
    deadline: str | None,
    max_failed: str | None,
) -> SubmitOptions:
    from headrace.client.policies import deadline_us, share
    from headrace.client.submit import SubmitOptions

    check_token("function", function)
    if lane not in list(LaneName):
        raise InvalidInput(f"lane {lane[:80]!r} is unknown: use one of {', '.join(LaneName)}", field="lane")
    if input_format not in FORMATS:
        raise InvalidInput(
            f"format {input_format[:80]!r} is unknown: use one of {', '.join(FORMATS)}", field="format"
        )
    if tokenise not in TOKENISE:
        raise InvalidInput(
            f"tokenise {tokenise[:80]!r} is unknown: use one of {', '.join(TOKENISE)}", field="tokenise"
        )
    return SubmitOptions(
        function=function,
        lane=LaneName(lane),
        form="rows" if rows else "lines",
        input_format=input_format,
        column=column,
        id_column=id_column,
        skip_bad=skip_bad,
        defaults=read_defaults(default),
        tokenise="client" if tokenizer and tokenise == "auto" else tokenise,
        tokenizer=tokenizer,
        patience_s=patience,
        # From now, and not from when the tokenizer is loaded and the input read.
        deadline=None if deadline is None else datetime.fromtimestamp(deadline_us(deadline) / 1e6, UTC),
        max_failed=None if max_failed is None else share(max_failed),
    )


def _print_receipt(receipt: Receipt, *, as_json: bool) -> None:
    for note in receipt.notes:
        say(f"note: {note}")
    if receipt.refused:
        print_errors(receipt.errors, receipt.refused, as_json=as_json, to_stdout=False)
    if as_json:
        keys = ("job", "submitted", "refused", "resumed_from")
        print_json({key: getattr(receipt, key) for key in keys})
        return
    resumed = f", {receipt.resumed_from:,} of them by an earlier run" if receipt.resumed_from else ""
    refused = f", {receipt.refused:,} lines refused" if receipt.refused else ""
    print_line(f"job {receipt.job}: {receipt.submitted:,} items stored{resumed}{refused}")


def print_errors(errors: list[LineError], total: int, *, as_json: bool, to_stdout: bool) -> None:
    """The bad lines: a JSON object each, or for people on standard error."""
    import msgspec

    if as_json:
        for error in errors:
            print_json(error) if to_stdout else say(msgspec.json.encode(error).decode())
        shown = len(errors)
    else:
        shown = min(len(errors), SHOWN_ERRORS)
        for error in errors[:shown]:
            say(f"line {error.line}{f', field {error.field}' if error.field else ''}: {error.error}")
    if total > shown:
        say(f"and {total - shown:,} more bad lines")
