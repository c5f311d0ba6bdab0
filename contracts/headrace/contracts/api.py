"""The front door: requests and replies of `hr.api.*`.

Each request gets exactly one reply with a JSON body. An error is `{"error": {"code", "message", ...}}`
with `Nats-Service-Error` and `Nats-Service-Error-Code` headers. The gateway serves what takes work in
(`submit`); completion serves what reads (`status`, `result`, `results`, `audit`, `query`, `jobs`) and `cancel`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.contracts.messages import Result
from headrace.contracts.names import Count, Index, Lane, Token


class SubmitReply(Struct, frozen=True, kw_only=True):
    """Receipt of `hr.api.submit`: `submitted` items are stored under `job`, the first as `index`."""

    job: str
    submitted: int
    index: int = 0
    resumed_from: int = 0
    trace_id: str | None = None


class JobRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `status` and `audit`."""

    job: Token


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `cancel`."""

    job: Token
    reason: Annotated[str, Meta(max_length=2048)] = ""


class ResultRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `result`: one item; waits up to `wait_s` for it to land."""

    job: Token
    index: Index = 0
    generation: Annotated[int, Meta(ge=1)] | None = None
    wait_s: Annotated[float, Meta(ge=0.0, le=4.0)] = 0.0


class ResultsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `results`: a page of outcomes in index order, from index `after` + 1 on."""

    job: Token
    after: Annotated[int, Meta(ge=-1)] = -1
    limit: Annotated[int, Meta(ge=1, le=5_000)] = 1_000


class ResultsReply(Struct, frozen=True, kw_only=True):
    """A page: `next` is the `after` of the following page, None at the end. Pages stay under max_payload."""

    job: str
    results: list[Result]
    next: int | None = None


class QueryRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `query`: one read-only statement; rows and time are bounded by the service."""

    sql: Annotated[str, Meta(min_length=1, max_length=100_000)]
    max_rows: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class QueryReply(Struct, frozen=True, kw_only=True):
    """Rows as lists in the order of `columns`; `truncated` if a bound cut them."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool = False


class JobStatus(Struct, frozen=True, kw_only=True):
    """The state of a job. At every moment submitted = ok + failed + dead + cancelled + queued + landing.

    `running` is what workers report of the queued ones; `duplicates` counts repeats that changed nothing.
    """

    job: str
    state: str
    submitted: Count
    ok: Count = 0
    failed: Count = 0
    dead: Count = 0
    cancelled: Count = 0
    queued: Count = 0
    landing: Count = 0
    running: Count = 0
    duplicates: Count = 0
    tokens_in: Count = 0
    tokens_out: Count = 0
    function: str = ""
    model: str | None = None
    lane: Lane = Lane.NORMAL
    opened_us: int = 0
    ended_us: int | None = None
    oldest_running_us: int | None = None


class Sources(Struct, frozen=True, kw_only=True):
    """The raw numbers that an audit compares, each from its own place."""

    manifest_stored: int
    manifest_closed: str
    tasks_in_broker: int
    results_in_broker: int
    rows_landed: int
    distinct_indices: int


class JobAudit(JobStatus, frozen=True, kw_only=True):
    """A status with its proof: the three sources, and what is missing as inclusive ranges of indices."""

    balanced: bool
    missing: list[tuple[int, int]]
    sources: Sources


class JobsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `jobs`: newest first."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50
    state: Annotated[str, Meta(max_length=64)] | None = None
