"""The reference part of docs/cli.md, made from the commands themselves.

`python -m headrace.cli.reference docs/cli.md` writes what stands below the marker there; with `--check` it
only compares, and exits 1 if that is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from headrace.cli.exit_codes import MEANINGS
from headrace.cli.main import app

MARKER = "<!-- below this line: python -m headrace.cli.reference docs/cli.md -->\n"


def reference() -> str:
    """Exit codes, then each command with its text, arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = ["\n## Exit codes\n", "| code | meaning |", "|---|---|"]
    parts += [f"| {int(code)} | {_cell(meaning)} |" for code, meaning in MEANINGS.items()]
    for name, command in group.commands.items():
        for full_name, each in _each(name, command):
            parts += ["", *_command(full_name, each)]
    return "\n".join(parts) + "\n"


def _each(name: str, command: Any) -> list[tuple[str, Any]]:
    """The command itself, or those of a group."""
    commands: dict[str, Any] = getattr(command, "commands", {})
    return [(f"{name} {sub}", each) for sub, each in commands.items()] or [(name, command)]


def _command(name: str, command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["headrace", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    lines = [f"## headrace {name}", "", f"`{usage}`", "", *_paragraphs(command.help or ""), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| `{p.name.upper()}` | {_cell(p.help or '')} |" for p in arguments]
    lines += [f"| {_names(p)} | {_cell(p.help or '')}{_default(p)} |" for p in options]
    return lines


def _paragraphs(text: str) -> list[str]:
    """The docstring, each paragraph on one line."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(paragraphs).splitlines()


def _names(option: Any) -> str:
    names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    value = "" if option.is_flag or not option.metavar else f" {_cell(option.metavar)}"
    return " / ".join(names) + value


def _default(option: Any) -> str:
    if option.is_flag or not option.show_default or option.default in (None, "", [], ()):
        return ""
    return f" [default: {option.default}]"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write or check the file that is named."""
    path = Path(arguments[0])
    before, marker, old = path.read_text("utf-8").partition(MARKER)
    new = reference()
    if "--check" in arguments:
        return 0 if marker and old == new else 1
    path.write_text(before + MARKER + new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
