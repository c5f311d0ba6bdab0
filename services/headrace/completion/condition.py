"""The condition of a retry: one SQL expression over the columns of `outcomes`, asked of the items that may run again.

It is somebody else's text, so it is parsed by DuckDB and held to be one expression, checked as every query is
(`sqlguard`), run read-only and within the bounds of a query, and can only choose among the rows it is given.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.completion.query import Interruptible, Queries
from headrace.completion.sqlguard import check
from headrace.completion.store import Connection
from headrace.contracts.errors import HeadraceError, InvalidInput, Refused, Unavailable
from headrace.contracts.names import check_token

_FETCH: Final = 10_000
_CLAUSES: Final = (
    "where_clause",
    "group_expressions",
    "group_sets",
    "having",
    "qualify",
    "sample",
    "modifiers",
)
"""What a SELECT has besides its list, and a mere expression has not."""


async def fitting(queries: Queries, job: str, condition: str) -> list[int]:
    """The indices of `job` whose current outcome is failed or dead and fits `condition`, in order.

    Raise `InvalidInput` (field `where`) for what is no condition, `Refused` for one that may not run, or takes too
    much time or memory; both name it.
    """
    # The line breaks end a comment that the condition may end with.
    statement = f"""SELECT "index" FROM (
    SELECT * FROM current_outcomes WHERE job = '{check_token("job", job)}' AND status IN ('failed', 'dead')
) AS outcomes WHERE (
{condition}
) ORDER BY "index" """  # noqa: S608
    try:
        return await queries.watched(_Choosing(condition, statement))
    except Unavailable:
        raise
    except HeadraceError as e:
        msg = f"the condition {_shown(condition)} is not taken: {e}"
        if isinstance(e, InvalidInput):
            raise InvalidInput(msg, field="where") from None
        raise Refused(msg, code=e.code) from None


class _Choosing(Interruptible[list[int]]):
    """Checks the condition and reads the indices that fit it, on a query's thread."""

    def __init__(self, condition: str, statement: str) -> None:
        super().__init__()
        self._condition = condition
        self._statement = statement

    def check(self, cursor: Connection) -> None:
        _check_one_expression(cursor, self._condition)
        check(cursor, self._statement)

    def work(self, cursor: Connection) -> list[int]:
        """Execute it, and fetch all."""
        cursor.execute(self._statement)
        found: list[int] = []
        while rows := cursor.fetchmany(_FETCH):
            found += [row[0] for row in rows]
        return found


def _check_one_expression(cursor: Connection, condition: str) -> None:
    """Raise `InvalidInput` unless `condition`, between parentheses, is one expression and nothing around it."""
    row = cursor.execute("SELECT json_serialize_sql(?::VARCHAR)", [f"SELECT (\n{condition}\n)"]).fetchone()
    try:
        tree: Any = msgspec.json.decode(row[0]) if row else {"error": True}
    except RecursionError:
        msg = "it is nested too deeply"
        raise InvalidInput(msg) from None
    if tree.get("error"):
        raise InvalidInput(" ".join(str(tree.get("error_message", "it is no SQL")).split())[:300])
    nodes = [statement.get("node", {}) for statement in tree["statements"]]
    one = len(nodes) == 1 and nodes[0].get("type") == "SELECT_NODE" and len(nodes[0]["select_list"]) == 1
    if one and nodes[0]["select_list"][0].get("function_name") == "row":
        one = False
    if (
        not one
        or nodes[0]["from_table"]["type"] != "EMPTY"
        or nodes[0]["cte_map"]["map"]
        or any(nodes[0].get(clause) for clause in _CLAUSES)
    ):
        msg = "it must be one expression that is true or false, as after WHERE"
        raise InvalidInput(msg)


def _shown(condition: str) -> str:
    text = " ".join(condition.split())
    return f"`{text[:200]}…`" if len(text) > 200 else f"`{text}`"  # noqa: PLR2004
