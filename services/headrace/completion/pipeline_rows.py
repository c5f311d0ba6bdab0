"""Pipelines in the data plane: their records, their stages, and that they are cancelled.

Each function works inside the caller's transaction and changes nothing when it is repeated.
"""

from __future__ import annotations

from typing import Final

from headrace.completion.job_rows import ENDED
from headrace.completion.stage_rows import arrive_all
from headrace.completion.store import Connection
from headrace.contracts.codec import PIPELINE
from headrace.contracts.errors import Refused
from headrace.contracts.pipeline import PipelineRecord

_NOTE = """
INSERT INTO pipelines SELECT $pipeline, $fingerprint, $record, make_timestamp($at::BIGINT),
    make_timestamp($deadline::BIGINT), NULL
WHERE NOT EXISTS (SELECT 1 FROM pipelines WHERE pipeline = $pipeline)"""

_STAGE = "INSERT INTO stages VALUES ($job, $pipeline, $stage, $number, $parent, $arrives, false)"

_ENDED: Final = ", ".join(f"'{state}'" for state in ENDED)

_LIVE = f"""EXISTS (
    SELECT 1 FROM stages AS s LEFT JOIN jobs AS j ON j.job = s.job
    WHERE s.pipeline = pipelines.pipeline AND coalesce(j.state, 'open') NOT IN ({_ENDED}))"""  # noqa: S608


_CANCEL = f"""
UPDATE pipelines SET cancel_reason = $reason
WHERE pipeline = $pipeline AND cancel_reason IS NULL AND {_LIVE}"""  # noqa: S608


def note(connection: Connection, record: PipelineRecord) -> bool:
    """Note a pipeline and its stages, unless it is; and what has landed of them before. Return whether it was new."""
    spec = record.spec
    if connection.execute("SELECT 1 FROM pipelines WHERE pipeline = ?", [spec.name]).fetchone():
        return False
    values: dict[str, object] = {
        "pipeline": spec.name,
        "fingerprint": record.fingerprint,
        "record": PIPELINE.encode(record).decode(),
        "at": record.opened_us,
        "deadline": record.deadline_us,
    }
    connection.execute(_NOTE, values)
    for number, stage in enumerate(spec.stages):
        parent = spec.parent_of(number)
        job, source = spec.job_of(stage), None if parent is None else spec.job_of(spec.stages[parent])
        arrives = source is not None and not stage.collect
        row = {"job": job, "pipeline": spec.name, "stage": stage.name, "number": number, "parent": source}
        connection.execute(_STAGE, row | {"arrives": arrives})
        if arrives:
            arrive_all(connection, job, source)
    return True


def refuse_retry(connection: Connection, job: str) -> None:
    """Raise `Refused` for a job that has fed another stage: what runs again in it would never get there."""
    fed = _feeding(connection, job)
    if fed:
        msg = (
            f"job {job} is a stage of a pipeline and has fed {', '.join(fed)}, which takes nothing more: run "
            "what failed as another pipeline"
        )
        raise Refused(msg, code="feeds_a_stage")


def _feeding(connection: Connection, job: str) -> list[str]:
    """The jobs that `job` feeds."""
    return [j for (j,) in connection.execute("SELECT job FROM stages WHERE parent = ?", [job]).fetchall()]


def record(connection: Connection, pipeline: str) -> tuple[PipelineRecord, str | None] | None:
    """The pipeline's record, and why it is cancelled if it is; None if it is not known."""
    row = connection.execute(
        "SELECT record, cancel_reason FROM pipelines WHERE pipeline = ?", [pipeline]
    ).fetchone()
    return None if row is None else (PIPELINE.decode(row[0].encode()), row[1])


def names(connection: Connection) -> set[str]:
    """Every pipeline that is known."""
    return {name for (name,) in connection.execute("SELECT pipeline FROM pipelines").fetchall()}


def cancel(connection: Connection, pipeline: str, reason: str) -> bool:
    """Note the intent to cancel, unless every stage has ended; the first reason stays. Return whether it is noted."""
    connection.execute(_CANCEL, {"pipeline": pipeline, "reason": reason})
    found = record(connection, pipeline)
    return found is not None and found[1] is not None


def being_cancelled(connection: Connection) -> list[str]:
    """Pipelines that are to be cancelled and have a stage that has not ended."""
    rows = connection.execute(
        f"SELECT pipeline FROM pipelines WHERE cancel_reason IS NOT NULL AND {_LIVE}"  # noqa: S608
    ).fetchall()
    return [name for (name,) in rows]
