"""`headrace demo`: real prompts through a mesh of its own, from nothing to the account, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Json


def demo(
    *,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="llamacpp (a small real model on the CPU), vllm, sim or echo (no model)."
        ),
    ] = "llamacpp",
    model: Annotated[
        str | None, typer.Option("--model", help="Another model than the demo's own.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="Another input file [default: examples/prompts.jsonl].", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Run in this folder and keep it [default: a temporary one].", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Run in ./.headrace-demo and keep it.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds that the job may take.")
    ] = 900.0,
    json: Json = False,
) -> None:
    """Run over a hundred prompts through a mesh that is started for it, and show the account and some answers.

    The model's weights (98 MB) are fetched once, checked, and kept in the user's cache. Exit code 0 if every
    item is ok and the audit balances; 3 if some failed.
    """
    from headrace.cli.demo_run import DemoOptions, run_demo

    options = DemoOptions(
        engine=engine, model=model, prompts=prompts, folder=folder, keep=keep, timeout_s=timeout, as_json=json
    )
    raise typer.Exit(run_demo(options))
