"""Which statements may run for others: one, that reads our tables, by DuckDB's own parser.

The parse tree is walked and what is not known to be harmless is refused: a file or an address to read, a table
function that shows settings or secrets, a statement that writes (DuckDB 2 has writing inside WITH), a function that
makes gigabytes of one argument. The transaction is read-only and the instance has no external access besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, cast

import duckdb
import msgspec

from headrace.completion.schema import TABLES
from headrace.completion.store import Connection
from headrace.contracts.errors import InvalidInput, Refused

NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Kinds of query; DuckDB has others, that write."""

FROM: Final = frozenset({"EMPTY", "BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "COLUMN_DATA", "PIVOT", "SHOW_REF", "CTE"})  # fmt: skip  # noqa: E501
TABLE_FUNCTIONS: Final = frozenset({"unnest", "range", "generate_series", "json_each", "json_tree"})
SCHEMA_VIEWS: Final = frozenset({"tables", "columns", "schemata"})
"""Of `information_schema`: names and types of what may be read anyway."""
SYSTEM_PREFIXES: Final = ("duckdb_", "pragma_", "sqlite_", "pg_")

_SECRETIVE = {
    "getenv", "current_setting", "getvariable", "which_secret", "write_log", "parse_duckdb_log_message",
    "json_execute_serialized_sql", "json_serialize_plan", "json_deserialize_sql", "nextval", "currval", "setval",
    "setseed", "pg_sleep", "sleep_ms", "add_parquet_key", "copy_database", "import_database", "query", "query_table",
}  # fmt: skip
# Each of these makes a value of any size from a number, in one step that no interrupt reaches.
_AMPLIFYING = {"list_resize", "array_resize", "range", "generate_series"}
# And these only if the number is large: the second argument, or a width in the text of the format.
_SIZED: Final = frozenset({"repeat", "lpad", "rpad"})
_FORMATS: Final = frozenset({"printf", "format"})
MAX_SIZE: Final = 10_000
_WIDE = re.compile(r"\d{5,}|\*|\{[^}]*\{")
FORBIDDEN: Final = frozenset(_SECRETIVE | _AMPLIFYING)
FORBIDDEN_PREFIXES: Final = (
    "duckdb_",
    "pragma_",
    "read_",
    "inet_",
    "enable_",
    "disable_",
    "force_",
    "sniff_",
    "parquet_",
)

MAX_JOINS: Final = 64
_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(ANALYZE\s+)?", re.IGNORECASE)


def check(connection: Connection, sql: str) -> None:
    """Return if `sql` may run; raise `InvalidInput` if it is no SQL, `Refused` (code `not_read_only`) if it may not."""
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as e:
        raise InvalidInput(_first_line(e), field="sql") from None
    if len(statements) != 1:
        msg = f"one statement at a time; this has {len(statements)}"
        raise InvalidInput(msg, field="sql")
    kind = statements[0].type.name
    if kind == "EXPLAIN":
        match = _EXPLAIN.match(sql)
        if match is None:
            raise _refused("EXPLAIN with options, or with a comment before it,")
        sql = sql[match.end() :]
    elif kind != "SELECT":
        raise _refused(kind)
    row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone()
    try:
        tree: Any = msgspec.json.decode(row[0]) if row else {"error": True}
    except RecursionError:
        msg = "the statement is nested too deeply"
        raise InvalidInput(msg, field="sql") from None
    if tree.get("error") or len(tree["statements"]) != 1:
        raise _refused("what is no SELECT")
    _check_tree(tree["statements"][0])


def _check_tree(tree: object) -> None:
    names = _cte_names(tree)
    for name in names:
        if name.startswith(SYSTEM_PREFIXES) or not re.fullmatch(r"\w+", name):
            raise _refused(f"a WITH query named {name[:80]!r}")
    joins = 0
    for node in _nodes(tree):
        kind = node.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in NODES:
            raise _refused(kind.removesuffix("_QUERY_NODE").removesuffix("_NODE"))
        if "function_name" in node:
            _check_function(node)
        if "sample" in node and "alias" in node and "query_location" in node:  # a part of FROM
            _check_source(node, names)
            joins += kind == "JOIN"
        elif kind == "CTE_NODE" and "query" not in node:
            raise _refused("this WITH query")
    if joins > MAX_JOINS:
        raise _refused(f"a join of more than {MAX_JOINS} tables")


def _check_source(node: dict[str, Any], names: set[str]) -> None:
    kind = node["type"]
    if kind not in FROM:
        raise _refused(f"FROM {kind}")
    if kind == "TABLE_FUNCTION":
        function: dict[str, Any] = node.get("function") or {}
        name = str(function.get("function_name", "")).lower()
        if name not in TABLE_FUNCTIONS or function.get("schema") or function.get("catalog"):
            raise _refused(f"the table function {name[:80]!r}")
        function["function_name"] = ""  # allowed here, in FROM; as a scalar `range` makes a list in memory
    elif kind == "BASE_TABLE":
        _check_table(node, names)
    elif kind == "SHOW_REF":
        shown = str(node.get("table_name") or "").strip('"').lower()
        if node.get("query") is None and shown not in {*TABLES, "tables"}:
            raise _refused(f"SHOW {shown[:80]}")


def _check_table(node: dict[str, Any], names: set[str]) -> None:
    table, schema = str(node.get("table_name", "")).lower(), str(node.get("schema_name", "")).lower()
    if node.get("catalog_name"):
        raise _refused("a table of another database")
    if schema == "information_schema" and table in SCHEMA_VIEWS:
        return
    if schema in ("", "main") and table in TABLES:
        return
    if not schema and table in names:
        return
    shown = f"{schema}.{table}" if schema else table
    raise _refused(f"the table {shown[:120]!r} (there are {', '.join(TABLES)})")


def _check_function(node: dict[str, Any]) -> None:
    name = str(node["function_name"]).lower()
    if name in FORBIDDEN or name.startswith(FORBIDDEN_PREFIXES):
        raise _refused(f"the function {name[:80]!r}")
    if name in _SIZED and not _is_small(_constant(node, 1)):
        raise _refused(f"{name} with a length that is not a number up to {MAX_SIZE}")
    if name in _FORMATS:
        text = _constant(node, 0)
        if text is None or _WIDE.search(text):
            raise _refused(f"{name} with a text that is no constant, or asks for a great width,")


def _constant(node: dict[str, Any], position: int) -> str | None:
    """The text of an argument that stands there as a constant, else None."""
    arguments: list[dict[str, Any]] = node.get("arguments") or []
    if position >= len(arguments):
        return None
    literal: dict[str, Any] = arguments[position].get("expression", {}).get("literal") or {}
    return None if literal.get("text") is None else str(literal["text"])


def _is_small(text: str | None) -> bool:
    return text is not None and text.isdecimal() and len(text) <= len(str(MAX_SIZE)) and int(text) <= MAX_SIZE


def _cte_names(tree: object) -> set[str]:
    names: set[str] = set()
    for node in _nodes(tree):
        cte_map: dict[str, list[dict[str, Any]]] = node.get("cte_map") or {}
        names.update(str(entry["key"]).lower() for entry in cte_map.get("map") or [])
        if node.get("type") in ("RECURSIVE_CTE_NODE", "CTE_NODE") and node.get("cte_name"):
            names.add(str(node["cte_name"]).lower())
    return names


def _nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Every object of the tree, parents first, without recursion (the tree may be deep)."""
    stack: list[Any] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            node = cast("dict[str, Any]", item)
            yield node
            stack.extend(node.values())
        elif isinstance(item, list):
            stack.extend(cast("list[Any]", item))


def _refused(what: str) -> Refused:
    return Refused(
        f"{what} is not allowed: queries read the data plane, and nothing else", code="not_read_only"
    )


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
