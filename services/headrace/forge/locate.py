"""From `pkg.mod:function` to the function, as who stands in the current folder means it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final, cast

from headrace.contracts.errors import InvalidInput, NotFound
from headrace.forge.function import Function, functions_of

BUILT_IN: Final = {"embed": "headrace.forge.builtin.embed:embed"}
"""Functions that come with Headrace and run as any other, by the name that stands for them."""
BY_ENGINE: Final = ("classify", "generate")
"""Built-in functions that an engine answers; whoever hosts it takes them by name."""


def find_function(target: str) -> Function[..., Any]:
    """The function that `pkg.mod:name` (or the name of a built-in one) means.

    Raise `NotFound` naming the module that cannot be imported and why, or the functions that it has.
    """
    target = BUILT_IN.get(target, target)
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        known = ", ".join([*sorted(BUILT_IN), *BY_ENGINE])
        msg = f"{target[:200]!r} names no function: write pkg.mod:function, or a built-in one ({known})"
        raise InvalidInput(msg, field="function", code="no_function")
    load_module(module)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Function):
        return cast("Function[..., Any]", found)
    what = "is no @function" if found is not None else "does not exist"
    raise NotFound(f"{target[:200]} {what}; {_told(module)}", code="no_function")


def find_functions(modules: str) -> list[Function[..., Any]]:
    """The functions of modules (`pkg.mod`), or single ones (`pkg.mod:name`, a built-in name), given with commas.

    Raise as `find_function`; `InvalidInput` for a module without any, or two functions of one name.
    """
    found: dict[str, Function[..., Any]] = {}
    for part in filter(None, (p.strip() for p in modules.split(","))):
        if ":" in part or part in BUILT_IN:
            some = [find_function(part)]
        else:
            load_module(part)
            some = functions_of(part)
            if not some:
                raise InvalidInput(f"{part} has no @function", field="functions", code="no_function")
        for function in some:
            other = found.setdefault(function.name, function)
            if other.reference != function.reference:
                msg = f"two functions are named {function.name!r}: {other.reference} and {function.reference}"
                raise InvalidInput(msg, field="functions", code="same_name")
    if not found:
        raise InvalidInput("no functions are named: give pkg.mod, or pkg.mod:function", field="functions")
    return list(found.values())


def load_module(name: str) -> None:
    """Import a module, with the current folder on the path as for `python -m`."""
    here = os.getcwd()  # noqa: PTH109  (an entry of sys.path is a string)
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            msg = (
                f"there is no module {name!r} (looked in {here} and the installed packages): run this in the folder "
                "that it lies in, or install its package"
            )
        else:
            msg = f"module {name!r} needs {e.name!r}, which is not installed: pip install it beside Headrace"
        raise NotFound(msg, code="no_module") from None
    except Exception as e:
        msg = f"module {name!r} cannot be imported: {type(e).__name__}: {str(e)[:500]}"
        raise InvalidInput(msg, field="function", code="bad_module") from e


def _told(module: str) -> str:
    known = ", ".join(f.call.__name__ for f in functions_of(module))
    return f"{module} has the functions {known}" if known else f"{module} has no @function at all"
