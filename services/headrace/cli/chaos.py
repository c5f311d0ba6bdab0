"""`headrace chaos`: a job on a mesh of its own that is broken on purpose, and the proof that nothing was lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Column, Function, IdColumn, InputFormat, Json
from headrace.cli.submit import FORMATS
from headrace.cli.up import known_engine
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from typing import Literal


def chaos(
    file: Annotated[
        str,
        typer.Argument(
            help="The job's input, as for submit: JSONL (gzip too), CSV or Parquet; - is standard input.",
            show_default=False,
        ),
    ],
    *,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=1, help="How long things are broken; then the job runs to its end."),
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, help="The same seed, the same faults [default: chance].", show_default=False
        ),
    ] = None,
    items: Annotated[
        int | None,
        typer.Option("--items", min=1, help="Repeat or cut the lines to so many.", show_default=False),
    ] = None,
    kills: Annotated[
        int | None,
        typer.Option(
            "--kills",
            min=0,
            max=1_000,
            help="SIGKILLs of worker, completion and broker, each; 0: no faults [default: one each 6 s, or 10].",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="sim or echo (no model, slowed to last), llamacpp or vllm.")
    ] = "sim",
    model: Annotated[str | None, typer.Option("--model", help="As for up.", show_default=False)] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, max=16, help="Worker processes.")] = 2,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, help="Items that run at once in a worker.", show_default=False),
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="NAME=VALUE",
            help="A setting of the engine itself; with one, sim and echo are not slowed.",
        ),
    ] = None,
    function: Function = "generate",
    durability: Annotated[
        str | None,
        typer.Option("--durability", help="safe or relaxed [default: safe].", show_default=False),
    ] = None,
    ack_wait: Annotated[
        float,
        typer.Option(
            "--ack-wait", min=0.5, max=60, help="Lease of a task, in seconds; some pauses are longer."
        ),
    ] = 3.0,
    patience: Annotated[
        float, typer.Option("--patience", min=1, help="Seconds that the job may take after the faults.")
    ] = 120.0,
    column: Column = None,
    id_column: IdColumn = None,
    input_format: InputFormat = "auto",
    rows: Annotated[
        bool, typer.Option("--rows", help="Each line is any JSON value, for a function that is no model.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Run in this folder, a new one, and keep it [default: a temporary one].",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folder (it is kept if anything is wrong).")
    ] = False,
    json: Json = False,
) -> None:
    """Run FILE as a job while its mesh is broken, then prove that each item has exactly one outcome.

    On a mesh of its own, never on yours: SIGKILL and SIGSTOP of workers, completion, broker and gateway, a submitter
    that is killed and started again, a full disk and a full queue, deliveries that come late or twice. Its account is
    audited all the while. It ends with a list of what was done and what is there: exit code 1 if an item was lost or
    doubled, an outcome belongs to another line, or the account did not balance. Leases last 3 s, and an item has 25
    tries, so that none is given up for what was done to its workers.
    """
    from headrace.cli.chaos_kit.load import Source
    from headrace.cli.chaos_kit.run import ChaosOptions, run_chaos

    known_engine(engine)
    if input_format not in FORMATS:
        raise InvalidInput(
            f"format {input_format[:80]!r} is unknown: use one of {', '.join(FORMATS)}", field="format"
        )
    options = ChaosOptions(
        source=Source(file=file, input_format=input_format, column=column, id_column=id_column, rows=rows),
        seconds=seconds,
        seed=seed,
        items=items,
        kills=kills,
        engine=engine,
        model=str(Path(model).expanduser()) if model else None,
        workers=workers,
        function=check_token("function", function),
        slots=slots,
        engine_options=engine_option or [],
        durability=_durability(durability),
        ack_wait_s=ack_wait,
        patience_s=patience,
        folder=folder,
        keep=keep,
        as_json=json,
    )
    raise typer.Exit(run_chaos(options))


def _durability(given: str | None) -> Literal["safe", "relaxed"] | None:
    match given:
        case None | "safe" | "relaxed":
            return given
        case _:
            raise InvalidInput(
                f"durability {given[:80]!r} is unknown: use safe or relaxed", field="durability"
            )
