"""The front door: requests and replies of `hr.api.*`.

Each request gets exactly one reply with a JSON body. An error is `{"error": {"code", "message", ...}}`
with `Nats-Service-Error` and `Nats-Service-Error-Code` headers. The gateway serves what takes work in
(`submit`); completion serves what reads (`status`, `result`, `results`, `audit`, `query`, `jobs`, `checks`) and
`cancel`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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


class ResultPartRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `result.part`: the JSON of an outcome that `result` or `results` gave as a `blob`, from part 0 on."""

    job: Token
    index: Index
    generation: Annotated[int, Meta(ge=1, le=10_000)] = 1
    part: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class ResultPartReply(Struct, frozen=True, kw_only=True):
    """`data` is a piece of text; `next` the part that follows it, None at the end. All pieces joined are the result."""

    job: str
    index: int
    generation: int
    part: int
    data: str
    next: int | None = None


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


class AuditRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `audit`: one job, or without one the whole tenant."""

    job: Token | None = None


class RetryRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `retry`: run the items of an ended job again whose last outcome is failed or dead and fits `where`.

    `where` is a condition in SQL over the columns of `outcomes`. With `generation`, the same request again is the
    same retry and not another one.
    """

    job: Token
    where: Annotated[str, Meta(max_length=2_048)] = ""
    generation: Annotated[int, Meta(ge=2, le=10_000)] | None = None


class RetryReply(Struct, frozen=True, kw_only=True):
    """`resubmitted` items run again as `generation`; 0 items if nothing fits (`generation` is then the last one).

    `left_out` items fit as well, but cannot run again: their task was too large to be carried by their outcome.
    """

    job: str
    generation: int
    resubmitted: int
    left_out: int = 0


class DeadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `dead`: what was given up, newest first, or one `id`; `after` is the last page's `next`."""

    job: Token | None = None
    id: Annotated[str, Meta(max_length=256)] | None = None
    after: Annotated[str, Meta(max_length=256)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class DeadEntry(Struct, frozen=True, kw_only=True):
    """Something that was given up: an `item` whose tries are exhausted, or a `letter` that no consumer could take.

    `id` is `<job>/<index>@<generation>` of an item, the letter's number in the stream of a letter. `redriven` says
    that it runs again already. `task`, `data` (text, or base64 where it is none) and `headers` come with `id` only.
    """

    id: str
    kind: Literal["item", "letter"]
    reason: str
    tries: int
    at_us: int
    job: str | None = None
    index: int | None = None
    generation: int | None = None
    error_type: str | None = None
    custom_id: str | None = None
    function: str | None = None
    worker: str | None = None
    origin: str | None = None
    subject: str | None = None
    redriven: bool = False
    task: Any = None
    data: str | None = None
    encoding: Literal["utf-8", "base64"] | None = None
    headers: dict[str, str] | None = None


class DeadReply(Struct, frozen=True, kw_only=True):
    """A page: `next` is the `after` of the following one, None at the end."""

    entries: list[DeadEntry]
    next: str | None = None


class RedriveRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `redrive`: one `id` as `dead` names it, or all that is dead of a job.

    A letter that was redriven before is refused without `again`.
    """

    job: Token | None = None
    id: Annotated[str, Meta(max_length=256)] | None = None
    again: bool = False


class RedriveReply(Struct, frozen=True, kw_only=True):
    """`redriven` things go their way again: items as `generation` of `job`, a letter on its own subject.

    `left` things of a job stay as they are; `note` says why.
    """

    redriven: int
    job: str | None = None
    generation: int | None = None
    left: int = 0
    note: str | None = None


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was checked: what was found, and how to mend it where that is needed.

    `ok` is as it should be, `warn` works with a risk, `fail` does not work, or may lose what was acknowledged.
    """

    check: str
    state: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


class ChecksRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `checks`: what completion finds of its own part. `accept_losses` are numbers of losses of the broker
    that an operator has seen and dealt with: they are told no more.
    """

    accept_losses: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=1_000)] = []


class ChecksReply(Struct, frozen=True, kw_only=True):
    """Completion's findings; `accepted` are the losses that this request accepted."""

    findings: list[Finding]
    accepted: list[int] = []


class LossesRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `losses`: of one stream, or of all."""

    stream: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class LostData(Struct, frozen=True, kw_only=True):
    """Something that the broker lost of a stream, until an operator accepts it by its number."""

    id: int
    stream: str
    found: str


class LossesReply(Struct, frozen=True, kw_only=True):
    """What completion saw of streams and is not there any more."""

    losses: list[LostData]


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
    generation: int = 1
    """Latest attempt generation: each retry is one more."""
    cause: str | None = None
    """Why it was ended early: `requested`, `deadline`, `failures`."""
    reason: str | None = None
    deadline_us: int | None = None


class Sources(Struct, frozen=True, kw_only=True):
    """The raw numbers that an audit compares, each from its own place.

    `rows_landed` counts the outcomes of all generations, `distinct_indices` the items that have their current one.
    While a retry is stored, `manifest_stored` is still what was submitted.
    """

    manifest_stored: int
    manifest_closed: str
    tasks_in_broker: int
    results_in_broker: int
    rows_landed: int
    distinct_indices: int


class ShapeAccount(Struct, frozen=True, kw_only=True):
    """The account of the items of one shape (`t6`; `?` for those whose shape is not known)."""

    shape: str
    submitted: int = 0
    ok: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    queued: int = 0
    landing: int = 0


class JobAudit(JobStatus, frozen=True, kw_only=True):
    """A status with its proof: the three sources, what is missing as inclusive ranges of indices, and each shape.

    `doubled` are indices with more than one outcome in one generation: the primary key forbids them, and it is
    looked all the same.
    """

    balanced: bool
    missing: list[tuple[int, int]]
    sources: Sources
    doubled: list[tuple[int, int]] = []
    shapes: list[ShapeAccount] = []


class TenantAudit(Struct, frozen=True, kw_only=True):
    """The account of all jobs of a mesh together, of which `open_jobs` have not ended.

    `unbalanced` names jobs whose own account does not balance (the first 100).
    """

    jobs: int
    open_jobs: int = 0
    submitted: int
    ok: int
    failed: int
    dead: int
    cancelled: int
    queued: int
    landing: int
    duplicates: int
    balanced: bool
    unbalanced: list[str]
    shapes: list[ShapeAccount]


class JobsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `jobs`: newest first."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50
    state: Annotated[str, Meta(max_length=64)] | None = None
