"""`headrace init`: make the streams, buckets and consumers of a mesh; refuse and print what is otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import ValidationError

from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line
from headrace.cli.target import run_on_mesh
from headrace.contracts.errors import InvalidInput, NotFound
from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh


def init(
    *,
    function: Annotated[
        str | None,
        typer.Option(
            "--function", help="Register this function too (a worker does so by itself).", show_default=False
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="The function's model, as recorded.")] = "",
    engine: Annotated[str, typer.Option("--engine", help="The function's engine, as recorded.")] = "",
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", min=0, help="Longest prompt + answer in tokens; 0: no limit.")
    ] = 0,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=0, help="Token ids from this on are refused; 0: none are.")
    ] = 0,
    unregister: Annotated[
        str | None,
        typer.Option(
            "--unregister",
            help="Forget this function, so that another model can take its name; refused while tasks wait for it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made, and make nothing.")
    ] = False,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Make what is missing of the mesh on a broker; what exists as it should stays. Safe to repeat.

    What exists with other settings is printed, nothing is changed, and the exit code is 1.
    """
    spec = None
    if function is not None:
        check_token("function", function)
        spec = _spec(function, engine=engine, model=model, max_model_len=max_model_len, vocab_size=vocab_size)
    if unregister is not None:
        run_on_mesh(folder, url, lambda mesh: _unregister(mesh, unregister))
        print_json({"unregistered": unregister}) if json else print_line(f"forgot function {unregister}")
        return
    made = run_on_mesh(folder, url, lambda mesh: _init(mesh, spec, dry_run=dry_run))
    if json:
        print_json({"made": made, "dry_run": dry_run})
        return
    for line in made:
        print_line(f"{'would make' if dry_run else 'made'} {line}")
    if not made:
        print_line("everything is there, as it should be")


async def _init(mesh: Mesh, spec: FunctionSpec | None, *, dry_run: bool) -> list[str]:
    from headrace.mesh.provision import get_function, provision, register_function

    made = await provision(mesh, dry_run=dry_run)
    if spec is None:
        return made
    known = True
    if not (dry_run and made):
        try:
            await get_function(mesh, spec.name)
        except NotFound:
            known = False
    if not dry_run:
        await register_function(mesh, spec)
    return made if known else [*made, f"function {spec.name}"]


async def _unregister(mesh: Mesh, name: str) -> None:
    from headrace.mesh.provision import unregister_function

    await unregister_function(mesh, name)


def _spec(name: str, *, engine: str, model: str, max_model_len: int, vocab_size: int) -> FunctionSpec:
    from msgspec import convert

    longest = max(max_model_len - 1, 0).bit_length() if max_model_len else 13
    values = {"name": name, "engine": engine, "model": model, "max_model_len": max_model_len, "vocab_size": vocab_size,
              "max_shape": min(max(longest, 6), 24)}  # fmt: skip
    try:
        return convert(values, FunctionSpec)
    except ValidationError as e:
        raise InvalidInput(f"the function cannot be registered so: {e}") from None
