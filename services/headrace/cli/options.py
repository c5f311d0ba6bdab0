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
