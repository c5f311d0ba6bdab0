"""Write what `docs/` shows of the code: JSON Schemas of every message, the settings, the checks of `headrace doctor`.

`python docs/generate.py` writes the files; with `--check` it writes none, names the stale ones and exits 1.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from doctor_page import doctor_text  # beside this file
from msgspec import _json_schema

from headrace.contracts import api, codec
from headrace.mesh import callee_settings, forge_settings, settings

DOCS = Path(__file__).parent

SETTINGS_HEAD = """\
# Settings

Written by `docs/generate.py` from `services/headrace/mesh/settings.py`; change that file, not this one.

A setting can come from `headrace.toml` (in the mesh's folder, else the current one), from the environment, or
from a flag of the command; the later of these wins. An unknown key is refused by name.
"""

SETTINGS_TAIL = """\
## Only in the environment

| variable | default | meaning |
|---|---|---|
| `HEADRACE_CACHE` | `~/.cache/headrace` | Where fetched models are kept. |
| `HEADRACE_TRACE_ITEMS_PER_JOB` | 1000 | Items of a sampled job that get spans; others carry its trace id. |
| `OTEL_EXPORTER_OTLP_ENDPOINT` | unset: all is off | Where spans and metrics go, as OTLP over HTTP. |
| `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` | unset | The same, as a whole URL for traces alone. |
| `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` | unset | The same for metrics alone. |
| `OTEL_METRIC_EXPORT_INTERVAL` | 60000 | Milliseconds between two reports of metrics. |
| `OTEL_SDK_DISABLED` | false | `true` switches both off whatever else is set. |
| `OTEL_TRACES_SAMPLER`, `…_ARG` | `parentbased_always_on` | Sampling, decided once for each job. |
| other `OTEL_*` | as in OpenTelemetry's SDK | Resource, headers, batch sizes, limits. |
| `TRACEPARENT` | unset | The trace that a submit joins. |
"""


def schema_files() -> dict[Path, str]:
    """JSON Schema (2020-12) of each message and of each request and reply of the front door."""
    types: dict[str, Any] = {schema.name.replace("/", "-"): schema.type for schema in codec.SCHEMAS}
    for name, type_ in vars(api).items():
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct) and type_.__module__ == api.__name__:
            types[f"api-{_kebab(name)}"] = type_
    return {DOCS / "schemas" / f"{name}.json": _schema_text(type_) for name, type_ in types.items()}


def _raw_default(value: Any) -> Any:
    """Raw JSON, where it is a field's default, as the value that it is."""
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    msg = f"a default of type {type(value).__name__} has no place in a schema"
    raise TypeError(msg)


# msgspec writes defaults into a schema without a way to say how.
_json_schema.to_builtins = functools.partial(msgspec.to_builtins, enc_hook=_raw_default)


def _schema_text(type_: Any) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(type_)}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


def settings_text() -> str:
    """The settings as Markdown: one table for each section."""
    parts = [SETTINGS_HEAD]
    parts.append(_section("General", settings.Settings, "", skip={*_SECTIONS, "callees", "functions"}))
    parts += [
        _section(f"`[{name}]`", type_, "–" if name == "policy" else name) for name, type_ in _SECTIONS.items()
    ]
    parts += [_section(f"`{name}`", type_, "–") for name, type_ in _IN_FILES.items()]
    parts.append(SETTINGS_TAIL)
    return "\n".join(parts)


# What Settings holds that is itself a Struct.
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    name: found
    for name, found in ((f.name, f.type) for f in msgspec.structs.fields(settings.Settings))
    if isinstance(found, type) and issubclass(found, msgspec.Struct)
}
_IN_FILES: dict[str, type[msgspec.Struct]] = {
    "[[policy.rules]]": callee_settings.PolicyRule,
    "[callees.NAME]": callee_settings.CalleeSettings,
    "[callees.NAME.price]": callee_settings.PriceSettings,
    "[callees.NAME.resolver]": callee_settings.ResolverSettings,
    "[functions.NAME]": forge_settings.FunctionSettings,
}
"""Tables that only a file can have."""


def _section(title: str, type_: type[msgspec.Struct], prefix: str, skip: set[str] | None = None) -> str:
    lines = [f"## {title}", "", inspect.getdoc(type_) or "", ""]
    lines += ["| setting | environment | values | default | meaning |", "|---|---|---|---|---|"]
    texts = _field_texts(type_)
    schema = msgspec.json.schema(type_)["$defs"][type_.__name__]["properties"]
    for field in msgspec.structs.fields(type_):
        if field.name in (skip or ()):
            continue
        row = [
            f"`{field.name}`",
            _variable(prefix, field.name),
            _values(schema[field.name]),
            _default(field),
            texts.get(field.name, ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def _variable(prefix: str, name: str) -> str:
    if name == "url":
        return "`HEADRACE_NATS_URL`"
    if prefix == "–":
        return prefix
    return (
        "–"
        if name == "engine_options"
        else f"`HEADRACE_{prefix.upper()}{'_' if prefix else ''}{name.upper()}`"
    )


def _values(schema: dict[str, Any]) -> str:
    """What a JSON Schema allows, in a few words."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    (one,) = options
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    kind = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "object": "table",
        "boolean": "yes or no",
        "array": "list",
    }
    said = "table" if "$ref" in one else kind.get(one.get("type", ""), "any")
    low, high = (
        one.get("minimum", one.get("exclusiveMinimum")),
        one.get("maximum", one.get("exclusiveMaximum")),
    )
    if low is not None or high is not None:
        above = "above " if "exclusiveMinimum" in one else "from "
        said += f" {above}{low:,}" if low is not None else ""
        said += f" to {high:,}" if high is not None else ""
    return said


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "–" if value in (None, "", {}, []) or isinstance(value, msgspec.Struct) else f"`{value}`"


def _field_texts(type_: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field of a Struct, which Python itself does not keep."""
    (definition,) = ast.parse(inspect.getsource(type_)).body
    texts: dict[str, str] = {}
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for field, after in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return texts


def stale(files: dict[Path, str]) -> list[Path]:
    """Files that are missing, differ, or are no longer made."""
    wrong = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    return wrong + [path for path in (DOCS / "schemas").glob("*.json") if path not in files]


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    arguments = parser.parse_args()
    files = {**schema_files(), DOCS / "settings.md": settings_text()}
    files[DOCS / "doctor.md"] = doctor_text(DOCS / "doctor.md")
    wrong = stale(files)
    for path in wrong:
        print("stale:" if arguments.check else "wrote:", path.relative_to(DOCS.parent))
        if not arguments.check and path in files:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], "utf-8")
        elif not arguments.check:
            path.unlink()
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
