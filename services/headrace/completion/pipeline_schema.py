"""The tables of pipelines, as one step of the schema.

No table here has a key: there is one writer, each insertion looks first, and an index of millions of rows would lie in
memory as a whole.
"""

from __future__ import annotations

from typing import Final

_PIPELINES = """
CREATE TABLE pipelines (
    pipeline VARCHAR NOT NULL,
    fingerprint VARCHAR NOT NULL,
    record JSON NOT NULL,
    opened_at TIMESTAMP NOT NULL,
    deadline_at TIMESTAMP,
    cancel_reason VARCHAR
)"""

# `arrives`: each ok row of the parent is noted as it lands; a stage that collects takes them all at the end.
_STAGES = """
CREATE TABLE stages (
    job VARCHAR NOT NULL,
    pipeline VARCHAR NOT NULL,
    stage VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    parent VARCHAR,
    arrives BOOLEAN NOT NULL,
    fed BOOLEAN NOT NULL DEFAULT false
)"""

# The order in which the ok rows of a stage's parent landed: it decides the indices of what they become.
_ARRIVALS = """
CREATE TABLE stage_arrivals (
    job VARCHAR NOT NULL,
    arrival BIGINT NOT NULL,
    parent_index BIGINT NOT NULL,
    generation INTEGER NOT NULL
)"""

# Rows `first`.. of the stage's job, `items` of them, came of row `parent_index` (of a stage that collects: of the
# `members` rows of one group).
_FEEDS = """
CREATE TABLE stage_feeds (
    job VARCHAR NOT NULL,
    arrival BIGINT NOT NULL,
    parent_index BIGINT NOT NULL,
    generation INTEGER NOT NULL,
    first BIGINT NOT NULL,
    items BIGINT NOT NULL,
    members BIGINT NOT NULL DEFAULT 1
)"""

# What a stage collects: its row `grp` has these rows of its parent, in this order.
_MEMBERS = """
CREATE TABLE stage_members (
    job VARCHAR NOT NULL,
    grp BIGINT NOT NULL,
    position BIGINT NOT NULL,
    "index" BIGINT NOT NULL,
    generation INTEGER NOT NULL
)"""

# Where each row of a stage comes from: `part` counts within what one row became.
_SOURCES = """
CREATE VIEW stage_sources AS
SELECT s.pipeline, s.stage, f.job, f.first + f.part AS "index", s.parent, f.parent_index, f.part
FROM (SELECT *, unnest(range(items)) AS part FROM stage_feeds) AS f JOIN stages AS s ON s.job = f.job
WHERE s.arrives
UNION ALL
SELECT s.pipeline, s.stage, m.job, m.grp, s.parent, m."index", m.position
FROM stage_members AS m JOIN stages AS s ON s.job = m.job"""

_KEPT = """
CREATE TABLE stage_kept (
    job VARCHAR NOT NULL,
    "index" BIGINT NOT NULL,
    kept JSON NOT NULL
)"""

PIPELINE_STEP: Final = (_PIPELINES, _STAGES, _ARRIVALS, _FEEDS, _MEMBERS, _KEPT, _SOURCES)
PIPELINE_TABLES: Final = (
    "pipelines", "stages", "stage_arrivals", "stage_feeds", "stage_members", "stage_kept", "stage_sources",
)  # fmt: skip
