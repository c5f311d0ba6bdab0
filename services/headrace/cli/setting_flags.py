"""Every setting as a flag: options made from the fields of the settings' Structs, help from the docstrings there."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from msgspec import NODEFAULT, Struct, structs

from headrace.contracts.errors import InvalidInput
from headrace.mesh.callee_settings import GatewaySettings
from headrace.mesh.forge_settings import ForgeSettings
from headrace.mesh.settings import AgentSettings, CompletionSettings, Settings, WorkerSettings

_SECTIONS: dict[str, type[Struct]] = {
    "worker": WorkerSettings,
    "completion": CompletionSettings,
    "gateway": GatewaySettings,
    "agent": AgentSettings,
    "forge": ForgeSettings,
}
_OWN_OPTION = {"dir", "policy", "callees", "functions"}
_PAIRS = "worker.engine_options"


def parameters(section: str | None) -> list[inspect.Parameter]:
    """Parameters for the settings that all services share, and for those of `section`."""
    made = [
        _parameter(Settings, f) for f in structs.fields(Settings) if f.name not in {*_SECTIONS, *_OWN_OPTION}
    ]
    if section:
        made += [_parameter(_SECTIONS[section], f) for f in structs.fields(_SECTIONS[section])]
    return made


def flags_of(section: str | None, given: dict[str, Any]) -> dict[str, object]:
    """The dotted flags for `load_settings` from what the command was given."""
    flags: dict[str, object] = {}
    for name, value in given.items():
        shared = name in Settings.__struct_fields__ and name not in {*_SECTIONS, *_OWN_OPTION}
        dotted = name if shared else f"{section}.{name}"
        flags[dotted] = _pairs(value) if dotted == _PAIRS and value else (value or None)
    return flags


def _parameter(owner: type[Struct], field: structs.FieldInfo) -> inspect.Parameter:
    flag = field.name.replace("_", "-")
    repeated = _bare(field.type) is dict
    default = "" if field.default in (NODEFAULT, None, "") else f" [default: {field.default}]"
    option = typer.Option(
        f"--{flag.removesuffix('s')}" if repeated else f"--{flag}",
        help=_help_texts(owner).get(field.name, "") + default,
        metavar="NAME=VALUE" if repeated else _metavar(field.type),
        show_default=False,
    )
    annotation: Any = list[str] | None if repeated else str | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def _pairs(values: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(
                f"{text[:200]!r} is not NAME=VALUE", field="engine_options", code="invalid_setting"
            )
        pairs[name] = value
    return pairs


def _variants(annotation: Any) -> Iterator[Any]:
    """The plain types of an annotation, without None and bounds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _variants(get_args(annotation)[0])
    elif origin is Literal or origin is dict:
        yield annotation
    elif origin is not None or hasattr(annotation, "__args__"):
        for part in get_args(annotation):
            yield from _variants(part)
    elif annotation is not type(None):
        yield annotation


def _bare(annotation: Any) -> Any:
    first = next(_variants(annotation))
    return get_origin(first) or first


def _metavar(annotation: Any) -> str:
    first = next(_variants(annotation))
    if get_origin(first) is Literal:
        return "|".join(get_args(first))
    return {int: "INTEGER", float: "NUMBER"}.get(first, "TEXT")


@cache
def _help_texts(owner: type[Struct]) -> dict[str, str]:
    """What stands under each field of `owner` in its source."""
    texts: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[owner.__module__])).body:
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                    match after:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            texts[before.target.id] = " ".join(text.split())
                        case _:
                            pass
    return texts
