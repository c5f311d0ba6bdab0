"""Each message of the task path: one frozen, keyword-only Struct with bounds on its fields.

New fields come only with defaults; the golden bytes of every released version decode for ever
(`tests/contracts`). Times are microseconds since the Unix epoch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from headrace.contracts.generation import DEFAULT_GENERATION, Generation
from headrace.contracts.names import (
    END,
    Attempt,
    Count,
    CustomId,
    Fingerprint,
    Index,
    Lane,
    Micros,
    ShapeNumber,
    ShortText,
    Token,
    TokenId,
)
from headrace.contracts.names import (
    Generation as GenerationNumber,
)

# --- what a task asks -------------------------------------------------------------------------------


class TextPrompt(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="text"):
    """A prompt as text; tokenised by whoever runs it."""

    text: Annotated[str, Meta(min_length=1)]


class TokenPrompt(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tokens"):
    """A prompt as token ids of the function's own tokenizer."""

    ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]


class ChatPrompt(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="chat"):
    """A conversation in OpenAI's form, rendered with the model's own chat template by whoever runs it."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4_096)]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None


class Blob(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where bytes lie that are too large for a message: an object of the mesh's object store.

    `digest` is `SHA-256=` and the base64url digest of the bytes, as the object store writes it.
    """

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    size: Count
    digest: Annotated[str, Meta(max_length=128)]


class BlobPrompt(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="blob"):
    """A prompt that is too large for a message: `blob` holds the JSON of the prompt itself, of any other kind."""

    blob: Blob


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="row"):
    """A row for a function that is no model: any JSON value."""

    value: Raw


Prompt = TextPrompt | TokenPrompt | ChatPrompt | Row
"""What an engine is given."""


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of work, on `hr.tasks.<function>.<lane>.<shape>.<job>`.

    `prompt_tokens` is exact if the client tokenised (`prompt` is then a `TokenPrompt`), an estimate
    otherwise; with `generation.max_tokens` it gave the shape. `sink` says who takes the result: `job`
    (completion) or `call` (the gateway).
    """

    job: Token
    index: Index
    function: Token
    prompt: Prompt | BlobPrompt
    params: Generation = DEFAULT_GENERATION
    params_fingerprint: Fingerprint = "0000000000000000"
    tenant: Token = "default"
    generation: GenerationNumber = 1
    custom_id: CustomId | None = None
    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt_tokens: Count = 0
    chat: bool = False
    """True if the answer is to be shaped as a chat completion though `prompt` is already tokens."""
    sink: Literal["job", "call"] = "job"
    submitted_us: Micros = 0
    deadline_us: Micros | None = None

    @property
    def key(self) -> str:
        """`job/index@generation`: unique per attempt generation, for logs and request ids."""
        return f"{self.job}/{self.index}@{self.generation}"


# --- what came of it --------------------------------------------------------------------------------


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that an item took."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class Choice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completion of a prompt. `logprobs` has OpenAI's form of the endpoint that was asked."""

    text: str = ""
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] = "stop"
    token_ids: list[TokenId] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    logprobs: Any = None
    stop_reason: str | int | None = None


class ItemError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an item failed: `type` is stable (`too_long`, `invalid_token`, ...), `message` names the thing."""

    type: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}" + END)]
    message: ShortText = ""
    field: Annotated[str, Meta(max_length=256)] | None = None


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When an item passed each stage, in microseconds since the epoch; 0 where unknown."""

    submitted_us: Micros = 0
    received_us: Micros = 0
    started_us: Micros = 0
    finished_us: Micros = 0


Status = Literal["ok", "failed", "dead", "cancelled"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "dead", "cancelled")


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The terminal outcome of a task, on `hr.results.<sink>.<function>.<job>`.

    `failed` and `dead` carry their task, so that a retry needs nothing but the outcome.
    """

    job: Token
    index: Index
    function: Token
    status: Status
    generation: GenerationNumber = 1
    tenant: Token = "default"
    custom_id: CustomId | None = None
    choices: list[Choice] = []
    value: Raw | UnsetType = UNSET
    """What a function that is no model returned, as it stands in JSON; unset for a model's answer."""
    usage: Usage = Usage()
    error: ItemError | None = None
    model: Annotated[str, Meta(max_length=512)] | None = None
    engine: Annotated[str, Meta(max_length=64)] = ""
    params_fingerprint: Fingerprint = "0000000000000000"
    worker: Token = "unknown"
    attempt: Attempt = 1
    chat: bool = False
    timings: Timings = Timings()
    trace_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}" + END)] | None = None
    task: Task | None = None
    shape: ShapeNumber | None = None
    """Shape of the task, as its subject said; None where it is not known (a result of an older worker)."""
    blob: Blob | None = None
    """The whole result, where it is too large for a message: this one has its key, its status and its usage only."""
    input_blob: Annotated[str, Meta(max_length=512)] | None = None
    """Name of the object that held the prompt: it goes once the item is ok."""

    @property
    def text(self) -> str:
        """Text of the first choice; empty where there is none."""
        return self.choices[0].text if self.choices else ""


# --- the life of a job ------------------------------------------------------------------------------


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job's progress record, stored in the same atomic batch as the tasks that it counts.

    `stored` items are stored: indices 0..stored-1. `consumed_lines` says where in the input to resume.
    `closed` ends the intake: `sealed` (every accepted line is stored) or `cancelled`.
    """

    job: Token
    input_fingerprint: Fingerprint
    stored: Count = 0
    consumed_lines: Count = 0
    closed: Literal["", "sealed", "cancelled"] = ""
    shapes: dict[str, Count] = {}
    """The stored items by shape (`t6`), so that the account can be proved for each shape."""
    generation: GenerationNumber = 1
    """2 and more: a retry; `stored` then counts the items that are stored again, in the order of their index."""


class JobOpened(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="opened"):
    """First event of a job; its compare-and-set on the subject makes the name unique."""

    job: Token
    function: Token
    input_fingerprint: Fingerprint
    tenant: Token = "default"
    lane: Lane = Lane.NORMAL
    model: Annotated[str, Meta(max_length=512)] | None = None
    source: Annotated[str, Meta(max_length=1024)] = ""
    at_us: Micros = 0
    traceparent: Annotated[str, Meta(max_length=64)] | None = None
    deadline_us: Micros | None = None
    """When the job is ended, whatever is left of it."""
    max_failed: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the landed items that may be failed or dead before the job is ended early."""
    pipeline: Token | None = None
    """The pipeline whose `stage` the job is."""
    stage: Token | None = None


class JobSealed(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sealed"):
    """The producer stored every accepted line: `count` items, indices 0..count-1; `refused` lines were not taken."""

    job: Token
    count: Count
    input_fingerprint: Fingerprint
    refused: Count = 0
    at_us: Micros = 0
    shapes: dict[str, Count] = {}
    """The items by shape (`t6`)."""


class JobRetried(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="retried"):
    """`count` items of an ended job run again as attempt generation `generation`; it ends anew when they have."""

    job: Token
    generation: GenerationNumber
    count: Count
    where: Annotated[str, Meta(max_length=2048)] = ""
    """Which: a condition in SQL over the job's outcomes."""
    at_us: Micros = 0


Cause = Literal["requested", "deadline", "failures"]
"""Why a job was ended before all its items ran: someone asked, its deadline passed, too many items failed."""


class JobCancelled(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancelled"):
    """The job was ended: what is not terminal of its `count` stored items becomes `cancelled`."""

    job: Token
    count: Count
    reason: ShortText = ""
    at_us: Micros = 0
    cause: Cause = "requested"
    shapes: dict[str, Count] = {}
    """The stored items by shape (`t6`)."""


class JobCompleted(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="completed"):
    """Every item is terminal and committed. `state` is the job's last."""

    job: Token
    state: Literal["completed", "completed_with_errors", "cancelled"]
    count: Count
    ok: Count = 0
    failed: Count = 0
    dead: Count = 0
    cancelled: Count = 0
    at_us: Micros = 0
    generation: GenerationNumber = 1
    cause: Cause | None = None
    """Of a job that ended as `cancelled`."""
    reason: ShortText = ""


JobEvent = JobOpened | JobSealed | JobRetried | JobCancelled | JobCompleted


class DeadLetter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that no consumer could take, whole: original bytes (base64 in JSON), subject and headers."""

    origin: Token
    subject: Annotated[str, Meta(max_length=1024)]
    reason: ShortText
    data: bytes
    headers: dict[str, str] = {}
    stream: str = ""
    sequence: Count = 0
    tries: Count = 0
    at_us: Micros = 0


# --- registry and reports ---------------------------------------------------------------------------


class FunctionSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registered function: what clients need to validate and shape work for it.

    `max_model_len` and `vocab_size` are 0 where there is no model. Shapes run from `min_shape` to
    `max_shape`; `t0` always exists for rows without tokens. `tokenizer` is a local path that a client
    may use if it has it; `tokenizer_fingerprint` tells whether it is the same one.
    """

    name: Token
    engine: Annotated[str, Meta(max_length=64)] = ""
    model: Annotated[str, Meta(max_length=512)] = ""
    max_model_len: Count = 0
    default_max_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 256
    vocab_size: Count = 0
    tokenizer: Annotated[str, Meta(max_length=1024)] = ""
    tokenizer_fingerprint: Annotated[str, Meta(max_length=64)] = ""
    lanes: list[Lane] = field(default_factory=lambda: list(Lane))
    min_shape: Annotated[int, Meta(ge=0, le=24)] = 6
    max_shape: Annotated[int, Meta(ge=0, le=24)] = 13
    version: Annotated[str, Meta(max_length=64)] = ""
    """Of a function over rows, as its author counts them; the model of each row that it made has it too."""

    def shapes(self) -> list[int]:
        """Every shape that has a consumer: 0 and min_shape..max_shape."""
        return [0, *range(max(1, self.min_shape), self.max_shape + 1)]

    def clamp_shape(self, shape: int) -> int:
        """The shape whose consumer takes work of `shape`: 0 stays, others are held inside the range."""
        return 0 if shape == 0 else min(max(shape, self.min_shape, 1), self.max_shape)


class WorkerReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of itself every second, in the bucket of reports; old ones expire."""

    worker: Token
    function: Token
    engine: str = ""
    model: str = ""
    state: Literal["starting", "running", "draining"] = "running"
    running: dict[str, Count] = {}
    """Items inside the engine by job (the 64 largest)."""
    oldest: dict[str, Micros] = {}
    """Start of the oldest running item by job."""
    in_flight: Count = 0
    tokens_in_flight: Count = 0
    capacity_tokens: Count = 0
    slots: Count = 0
    done: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    at_us: Micros = 0
