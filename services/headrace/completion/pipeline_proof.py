"""What the data plane says of the feeding of a stage, and what of it breaks the law: see `pipeline_account`."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from headrace.completion import stage_groups
from headrace.completion.job_rows import ENDED
from headrace.completion.stage_mapping import UNFIT
from headrace.completion.stage_rows import Stage
from headrace.completion.store import Connection
from headrace.contracts.pipeline import PipelineRecord

_UNFIT: Final = (
    "SELECT count(*) FROM outcomes WHERE job = ? AND status = 'failed' AND starts_with(error_type, ?)"
)

_FED = """
SELECT count(*), count(DISTINCT parent_index), coalesce(sum(items), 0), coalesce(max(first + items), 0),
    coalesce(max(arrival), -1) + 1,
    count(*) FILTER (first <> before) FROM (
    SELECT *, coalesce(sum(items) OVER (
        ORDER BY arrival ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
    FROM stage_feeds WHERE job = ?)"""

_ARRIVED = """
SELECT count(*), count(DISTINCT parent_index), coalesce(max(arrival), -1) + 1 FROM stage_arrivals WHERE job = ?"""

_OK = "SELECT count(DISTINCT \"index\") FROM outcomes WHERE job = ? AND status = 'ok'"


class Feeding(Struct, frozen=True):
    """What the data plane says of the feeding of one stage, at one moment."""

    arrived: int = 0
    fed: int = 0
    assigned: int = 0
    sealed: bool = False
    lost: int = 0
    unfit: int = 0
    parent_ended: bool = False
    child: str | None = None
    problems: list[str] = []


def feeding_of(
    connection: Connection, stage: Stage, record: PipelineRecord, *, prove: bool = False
) -> Feeding:
    """What fed `stage`; with `prove` also what of it breaks the law."""
    unfit = connection.execute(_UNFIT, [stage.job, UNFIT]).fetchall()[0][0]
    states: dict[str, str] = dict(
        connection.execute(
            "SELECT job, state FROM jobs WHERE job IN (?, ?)", [stage.job, stage.parent]
        ).fetchall()
    )
    child = states.get(stage.job)
    if stage.parent is None:
        return Feeding(unfit=unfit, child=child)
    spec = record.spec.stages[stage.number]
    rows, parents, items, assigned, arrivals, misplaced = connection.execute(_FED, [stage.job]).fetchall()[0]
    ok = connection.execute(_OK, [stage.parent]).fetchall()[0][0]
    lost = connection.execute(
        "SELECT coalesce(sum(failed + dead + cancelled), 0) FROM jobs WHERE job = ?", [stage.parent]
    ).fetchall()[0][0]
    parent_ended = states.get(stage.parent) in ENDED
    problems: list[str] = []
    if prove:
        if rows != parents or rows != arrivals:
            problems.append(f"{rows:,} rows were divided, {parents:,} of them different ones")
        if misplaced or items != assigned:
            problems.append(f"{misplaced:,} rows do not begin where those before them end")
        problems += (
            _collect_problems(connection, stage, record, rows)
            if spec.collect
            else _arrival_problems(connection, stage, ok, rows)
        )
        if (
            not spec.collect
            and parent_ended
            and child in ("completed", "completed_with_errors")
            and rows != ok
        ):
            problems.append(f"it has ended, and {ok - rows:,} rows of the stage before never fed it")
    return Feeding(
        arrived=ok,
        fed=rows,
        assigned=assigned,
        sealed=child not in (None, "open"),
        lost=int(lost),
        unfit=unfit,
        parent_ended=parent_ended,
        child=child,
        problems=problems,
    )


def _arrival_problems(connection: Connection, stage: Stage, ok: int, fed: int) -> list[str]:
    n, parents, numbers = connection.execute(_ARRIVED, [stage.job]).fetchall()[0]
    problems: list[str] = []
    if n != ok or n != parents or n != numbers:
        problems.append(
            f"{ok:,} rows of the stage before are ok, {n:,} arrived, {parents:,} of them different ones"
        )
    if fed > n:
        problems.append(f"{fed:,} rows were divided, {n:,} have arrived")
    return problems


def _collect_problems(connection: Connection, stage: Stage, record: PipelineRecord, rows: int) -> list[str]:
    wrong = stage_groups.differences(connection, stage, record.spec) if rows else 0
    return [f"{wrong:,} groups or members are others than the stage before says"] if wrong else []
