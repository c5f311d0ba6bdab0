"""`headrace functions`: what is registered in a mesh, or declared in a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line, print_table
from headrace.cli.target import run_on_mesh

if TYPE_CHECKING:
    from headrace.contracts.messages import FunctionSpec
    from headrace.forge.function import Function
    from headrace.mesh.connection import Mesh


def functions(
    modules: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULES]",
            help="pkg.mod, several with commas: what they declare, without a mesh [default: what is registered].",
            show_default=False,
        ),
    ] = None,
    *,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the functions that work can be submitted for, with engine, model and version.

    A worker registers what it serves, and `headrace run --batching submit` what it stores rows for. With MODULES, list
    the @functions that those declare instead.
    """
    if modules is not None:
        _print_declared(modules, as_json=json)
        return
    found = run_on_mesh(folder, url, _registered)
    if json:
        print_json({"functions": [_plain(spec) for spec in found]})
    elif not found:
        print_line("no functions are registered: start a worker")
    else:
        columns = ("function", "version", "engine", "model", "longest item", "lanes")
        print_table(
            columns,
            [
                (s.name, s.version, s.engine, s.model, s.max_model_len or None, ", ".join(s.lanes))
                for s in found
            ],
        )


async def _registered(mesh: Mesh) -> list[FunctionSpec]:
    from headrace.mesh.provision import list_functions

    return await list_functions(mesh)


def _plain(spec: FunctionSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "version": spec.version,
        "engine": spec.engine,
        "model": spec.model,
        "takes": "rows" if spec.shapes() == [0] else "prompts",
        "max_model_len": spec.max_model_len,
        "lanes": [str(lane) for lane in spec.lanes],
        "shapes": spec.shapes(),
    }


def _print_declared(modules: str, *, as_json: bool) -> None:
    from headrace.forge.locate import find_functions

    found = find_functions(modules)
    if as_json:
        print_json({"functions": [_declared(function) for function in found]})
        return
    columns = ("function", "version", "rows", "answers", "batching", "what it does")
    rows = [
        (d["name"], d["version"], d["rows"], d["answers"], d["batching"], d["summary"])
        for d in map(_declared, found)
    ]
    print_table(columns, rows)


def _declared(function: Function[..., Any]) -> dict[str, Any]:
    declared = function.declared
    return {
        "name": function.name,
        "version": function.version,
        "reference": function.reference,
        "rows": function.codec.row_type,
        "answers": function.codec.answer_type,
        "batching": None if declared.batching is None else str(declared.batching),
        "processes": declared.processes,
        "async": function.is_async,
        "summary": function.summary,
    }
