"""Pipelines: stages, each a job of its own, and what feeds one from the outcomes of another.

`pipeline_checks` says what cannot be. The record of a pipeline lies in a key-value bucket, by the pipeline's name.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from headrace.contracts.generation import DEFAULT_GENERATION, Generation
from headrace.contracts.names import Count, Fingerprint, Lane, Micros, ShortText, Token

MAX_STAGES: Final = 32
MAX_FAN_OUT: Final = 100_000
"""Rows that one row may become."""

PathText = Annotated[str, Meta(min_length=1, max_length=256)]
Template = Annotated[str, Meta(min_length=1, max_length=65_536)]


class StageSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One stage: a function, and how a row of the stage before becomes its row or prompt.

    One of `row` (a path, or an object of paths), `prompt` (text for a model) or `chat` (a user's message, with an
    optional `system`); without any, the row is `value`, or `item` with `each`. `each` makes a row of each element of an
    array; `collect` makes one row of all rows (`true`), or of those that came of one row by the last `each` before it
    (`parent`). `where` leaves rows out whose value is false, null, empty or not there. `keep` are fields that the row
    carries along: `kept.<name>` in the stages after it (the last part of the path, where no name is given).
    """

    name: Token
    function: Token
    after: Token | None = field(default=None, name="from")
    """The stage that feeds this one; the one before it in the file by default."""
    job: Token | None = None
    """Name of its job, `<pipeline>-<stage>` by default."""
    lane: Lane | None = None
    params: Generation = DEFAULT_GENERATION
    row: PathText | Annotated[dict[PathText, PathText], Meta(min_length=1, max_length=64)] | None = None
    prompt: Template | None = None
    chat: Template | None = None
    system: Template | None = None
    each: PathText | None = None
    collect: bool | Literal["parent"] = False
    where: PathText | None = None
    keep: (
        Annotated[list[PathText], Meta(max_length=32)]
        | Annotated[dict[PathText, PathText], Meta(max_length=32)]
    ) = []
    max_failed: Annotated[float, Meta(ge=0, le=1)] | None = None


class PipelineSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A pipeline as it is declared, without its input."""

    name: Token
    stages: Annotated[list[StageSpec], Meta(min_length=1, max_length=MAX_STAGES)]
    lane: Lane = Lane.NORMAL
    deadline: Annotated[str, Meta(max_length=64)] | None = None
    """As it was written: `2h`, or a point in time."""

    def job_of(self, stage: StageSpec) -> str:
        """Name of the job of `stage`."""
        return stage.job or f"{self.name}-{stage.name}"

    def lane_of(self, stage: StageSpec) -> Lane:
        """Lane of the tasks of `stage`."""
        return stage.lane or self.lane

    def parent_of(self, number: int) -> int | None:
        """Position of the stage that feeds stage `number`; None for the first."""
        if number == 0:
            return None
        after = self.stages[number].after
        return number - 1 if after is None else next(i for i, s in enumerate(self.stages) if s.name == after)


class PipelineRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pipeline that was opened, in the bucket of pipelines."""

    spec: PipelineSpec
    fingerprint: Fingerprint
    tenant: Token = "default"
    opened_us: Micros = 0
    deadline_us: Micros | None = None


# --- the front door ---------------------------------------------------------------------------------


class PipelineOpenRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `pipeline.open`: record it, unless it is; `deadline_us` counts the first time."""

    spec: PipelineSpec
    deadline_us: Micros | None = None
    tenant: Token = "default"


class PipelineOpenReply(Struct, frozen=True, kw_only=True):
    """`jobs` are those of the stages, in order; `again`: it had been opened before."""

    pipeline: str
    state: str
    jobs: list[str]
    again: bool = False
    deadline_us: int | None = None


class PipelineRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `pipeline.status` and `pipeline.audit`."""

    pipeline: Token


class PipelineCancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `pipeline.cancel`."""

    pipeline: Token
    reason: ShortText = ""


class PipelinesRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `pipeline.list`: newest first."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50


class StageStatus(Struct, frozen=True, kw_only=True):
    """A stage with the account of its job. `state` is `waiting` while its job is not open.

    `waiting`: rows that it will be fed of what the stage before has landed, as far as that is known (a row that fans
    out counts once until it is divided). `lost`: rows of the stage before that ended otherwise than ok, and feed
    nothing. `unfit`: of the failed ones, those that could not be made from the row before.
    """

    stage: str
    job: str
    function: str
    state: str
    submitted: Count = 0
    ok: Count = 0
    failed: Count = 0
    dead: Count = 0
    cancelled: Count = 0
    queued: Count = 0
    landing: Count = 0
    running: Count = 0
    duplicates: Count = 0
    waiting: Count = 0
    lost: Count = 0
    unfit: Count = 0


class PipelineStatus(Struct, frozen=True, kw_only=True):
    """`state`: `running`, `cancelling`; at the end `completed`, `completed_with_errors`, `cancelled`."""

    pipeline: str
    state: str
    stages: list[StageStatus]
    opened_us: int = 0
    deadline_us: int | None = None
    reason: str | None = None


class StageAudit(StageStatus, frozen=True, kw_only=True):
    """A stage with its proof. `balanced`: its job's own account holds, and so does what fed it.

    `arrived` rows of the stage before are ok; `fed` of them were divided into `assigned` rows, of which `submitted` are
    stored; `expected` is counted anew from the values. `problems` says what does not hold.
    """

    balanced: bool
    arrived: int = 0
    fed: int = 0
    assigned: int = 0
    expected: int = 0
    problems: list[str] = []


class PipelineAudit(Struct, frozen=True, kw_only=True):
    """`balanced` if every stage is."""

    pipeline: str
    state: str
    balanced: bool
    stages: list[StageAudit]


class PipelineEntry(Struct, frozen=True, kw_only=True):
    """One line of `pipeline.list`."""

    pipeline: str
    state: str
    stages: int
    opened_us: int = 0


class PipelinesReply(Struct, frozen=True, kw_only=True):
    """Newest first."""

    pipelines: list[PipelineEntry]
