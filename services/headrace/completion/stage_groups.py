"""What a stage collects: which rows, in which groups, in which order.

Rows take their indices as they land, so the index of a row does not say where it comes from: that is followed back,
stage by stage. The order is that of the input, and of each array that was fanned out. A group of `collect = "parent"`
is what came of one row by the nearest fan-out before the stage; a row that fanned out into nothing has an empty group.
"""

from __future__ import annotations

from typing import Final

from headrace.completion.stage_rows import Stage
from headrace.completion.store import Connection
from headrace.contracts.pipeline import PipelineSpec
from headrace.mesh.crash import crash_point

GROUPS_AT_ONCE: Final = 200
"""Groups that are read together."""

_LINK = """(
    SELECT unnest(range(first, first + items)) AS i, parent_index AS p FROM stage_feeds WHERE job = '{job}'
)"""

_NOTE = """
INSERT INTO stage_feeds
SELECT $job, g.n, g.parent_index, 1, g.n, 1, count(m."index")
FROM ({groups}) AS g LEFT JOIN (SELECT grp, "index" FROM stage_members WHERE job = $job) AS m ON m.grp = g.n
GROUP BY g.n, g.parent_index"""

_KEYS = """
SELECT grp, "index", generation FROM stage_members
WHERE job = $job AND grp >= $first AND grp < $end AND position >= $position ORDER BY grp, position LIMIT $limit"""

_SIZES = """
SELECT members FROM stage_feeds WHERE job = $job AND first >= $first ORDER BY first LIMIT $limit"""


def collect(connection: Connection, stage: Stage, spec: PipelineSpec) -> int:
    """Note the groups of a stage and their members, once its parent has ended; return how many groups there are.

    Inside the caller's transaction; repeated, it changes nothing.
    """
    values = {"job": stage.job}
    if not connection.execute("SELECT 1 FROM stage_feeds WHERE job = ? LIMIT 1", [stage.job]).fetchone():
        groups, members = statements(stage, spec)
        connection.execute(f"INSERT INTO stage_members SELECT $job, * FROM ({members})", values)  # noqa: S608
        connection.execute(_NOTE.format(groups=groups), values)
        crash_point("pipeline-before-collect")
    row = connection.execute("SELECT count(*) FROM stage_feeds WHERE job = ?", [stage.job]).fetchone()
    return 0 if row is None else int(row[0])


def statements(stage: Stage, spec: PipelineSpec) -> tuple[str, str]:
    """Two SELECTs: the groups (`n`, `parent_index`), and the members (`grp`, `position`, `index`, `generation`)."""
    chain = _chain(stage, spec)
    source = chain[0][0]
    joins = "".join(
        f" JOIN {_LINK.format(job=job)} AS l{at} ON l{at}.i = {_index(at)}"
        for at, (job, _) in enumerate(chain[:-1])
    )
    order = ", ".join(_index(at) for at in reversed(range(len(chain))))
    rows = f"""(
        SELECT "index" AS i, min(generation) AS generation FROM current_outcomes
        WHERE job = '{source}' AND status = 'ok' GROUP BY "index") AS s"""  # noqa: S608  (checked names)
    if spec.stages[stage.number].collect != "parent":
        return (
            "SELECT 0 AS n, 0 AS parent_index",
            f"SELECT 0, row_number() OVER (ORDER BY {order}) - 1, s.i, s.generation FROM {rows}{joins}",  # noqa: S608
        )
    out = next(at for at, (_, fans_out) in enumerate(chain) if fans_out)
    # Every row that was fanned out, in its own order: also those of which nothing came.
    above = "".join(
        f" JOIN {_LINK.format(job=job)} AS l{at} ON l{at}.i = "
        + ("f.parent_index" if at == out + 1 else _index(at))
        for at, (job, _) in enumerate(chain[:-1])
        if at > out
    )
    by = ", ".join([*(_index(at) for at in reversed(range(out + 2, len(chain)))), "f.parent_index"])
    groups = f"""
        SELECT row_number() OVER (ORDER BY {by}) - 1 AS n, f.parent_index
        FROM stage_feeds AS f{above} WHERE f.job = '{chain[out][0]}'"""  # noqa: S608
    members = f"""
        SELECT g.n, row_number() OVER (PARTITION BY g.n ORDER BY {order}) - 1, s.i, s.generation
        FROM {rows}{joins} JOIN ({groups}) AS g ON g.parent_index = {_index(out + 1)}"""  # noqa: S608
    return groups, members


def differences(connection: Connection, stage: Stage, spec: PipelineSpec) -> int:
    """How many groups and members are noted otherwise than they would be now; what an audit asks."""
    groups, members = statements(stage, spec)
    noted = 'SELECT grp, position, "index", generation FROM stage_members WHERE job = $job'
    wanted = f"""
        SELECT count(*) FROM (
            (SELECT * FROM ({members}) EXCEPT ALL {noted}) UNION ALL ({noted} EXCEPT ALL SELECT * FROM ({members})))
        """  # noqa: S608
    row = connection.execute(wanted, {"job": stage.job}).fetchone()
    counts = f"""
        SELECT abs((SELECT count(*) FROM ({groups})) - (SELECT count(*) FROM stage_feeds WHERE job = $job))"""  # noqa: S608
    more = connection.execute(counts, {"job": stage.job}).fetchone()
    return (0 if row is None else int(row[0])) + (0 if more is None else int(more[0]))


def sizes(connection: Connection, job: str, first: int, limit: int) -> list[int]:
    """How many members the groups `first`.. have."""
    rows = connection.execute(_SIZES, {"job": job, "first": first, "limit": limit}).fetchall()
    return [int(n) for (n,) in rows]


def keys(
    connection: Connection, job: str, *, first: int, end: int, position: int, limit: int
) -> list[tuple[int, int, int]]:
    """Group, index and generation of members of groups `first`..`end`, in order; of the first from `position` on."""
    values = {"job": job, "first": first, "end": end, "position": position, "limit": limit}
    return connection.execute(_KEYS, values).fetchall()


def _chain(stage: Stage, spec: PipelineSpec) -> list[tuple[str, bool]]:
    """The jobs from the one that is collected back to where its order begins, each with whether it fans out."""
    chain: list[tuple[str, bool]] = []
    number = spec.parent_of(stage.number)
    while number is not None:
        declared = spec.stages[number]
        chain.append((spec.job_of(declared), declared.each is not None))
        # What is collected has the order of its groups already.
        number = None if declared.collect else spec.parent_of(number)
    return chain


def _index(at: int) -> str:
    """The column with a row's index in the job `at` steps back."""
    return "s.i" if at == 0 else f"l{at - 1}.p"
