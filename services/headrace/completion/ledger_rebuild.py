"""The ledger's tables made anew beside those in use, compared with them row by row, and put in their place at once."""

from __future__ import annotations

from typing import Final

from headrace.completion.ledger_rows import NEW
from headrace.completion.ledger_schema import HEAD_COLUMNS, RECORD_COLUMNS
from headrace.completion.store import Connection

TABLES: Final = (("call_records", RECORD_COLUMNS), ("budget_heads", HEAD_COLUMNS))


def begin(connection: Connection) -> None:
    """Make the empty tables of a rebuild; what an earlier one left is dropped."""
    for table, columns in TABLES:
        connection.execute(f"CREATE OR REPLACE TABLE {table}{NEW} ({columns})")


def drop(connection: Connection) -> None:
    """Drop what a rebuild that was cut short has left."""
    for table, _ in TABLES:
        connection.execute(f"DROP TABLE IF EXISTS {table}{NEW}")


def end(connection: Connection, settled_seq: int) -> dict[str, int]:
    """Put the rebuilt tables in place of those in use; return for each how many of its rows had not been right.

    Not right is a row that the ledger does not have, or has otherwise; and a record up to `settled_seq` without its
    row. Records above that may have been on their way still.
    """
    wrong: dict[str, int] = {}
    for table, _ in TABLES:
        found = connection.execute(
            f"""SELECT count(*) FROM (SELECT sequence, hash(t) AS had FROM {table} AS t)
            FULL JOIN (SELECT sequence, hash(t) AS has FROM {table}{NEW} AS t) USING (sequence)
            WHERE had IS DISTINCT FROM has AND (had IS NOT NULL OR sequence <= $1)""",  # noqa: S608  (constants)
            [settled_seq],
        ).fetchone()
        wrong[table] = int(found[0]) if found else 0
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE {table}{NEW} RENAME TO {table}")
    return wrong


def last_sequence(connection: Connection) -> int:
    """The highest sequence that has a row; 0 if there is none."""
    found = connection.execute(
        "SELECT greatest((SELECT max(sequence) FROM call_records), (SELECT max(sequence) FROM budget_heads))"
    ).fetchone()
    return int(found[0]) if found and found[0] is not None else 0
