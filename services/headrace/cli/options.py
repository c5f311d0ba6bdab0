"""The options that many commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Folder of a local mesh [default: $HEADRACE_DIR, else ./.headrace].", show_default=False
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of the broker, nats://host:port [default: $HEADRACE_NATS_URL, else the mesh of --dir].",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, errors too.")]
Job = Annotated[str, typer.Argument(help="Name of the job.", show_default=False)]
Function = Annotated[str, typer.Option("--function", help="The registered function that does the work.")]
Lane = Annotated[
    str, typer.Option("--lane", help="urgent, normal or bulk: urgent work passes a bulk backlog.")
]
Progress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="[default: on a terminal]", show_default=False),
]
Patience = Annotated[
    float, typer.Option("--patience", min=0, help="Seconds to go on while nothing gets stored.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Take the good lines and report the bad ones.")]
Column = Annotated[
    str | None,
    typer.Option("--column", help="CSV, Parquet: the column with the prompts.", show_default=False),
]
IdColumn = Annotated[
    str | None,
    typer.Option("--id-column", help="CSV, Parquet: the column with the custom ids.", show_default=False),
]
InputFormat = Annotated[str, typer.Option("--format", help="auto, jsonl, csv or parquet.")]
