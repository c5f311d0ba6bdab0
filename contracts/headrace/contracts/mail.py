"""Mail between agents, the committed state of an agent, and kept answers.

A mail stands on `hr.mail.<to>.<lane>.<sender>`: the sender is a token of the subject, so that the broker's permissions
say who may send as whom, and each sender has its own bound in a mailbox. A state stands on `hr.agents.state.<agent>`
and is written by compare-and-set: one record holds what a handler changed and what it sends, so both happen or neither.
An answer that somebody fetches by a request's id stands on `hr.replies.<request>`.

Bodies are JSON of any form. The fields of a mail map to a message of A2A 1.0: `id` is `messageId`, `conversation` is
`contextId`, `task` is `taskId`, and a body with `parts` (and `role`, `metadata`) is the rest of it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Raw, Struct

from headrace.contracts.names import END, Count, Micros, ShortText, Token

MailLane = Literal["work", "control", "reply"]
"""`work` is handled one by one and in order; `control` is always being read; `reply` brings answers and notices."""

Kind = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}" + END)]
"""What a mail is about, in its receiver's words: it decides which handler takes it."""

Hops = Annotated[int, Meta(ge=0, le=1_000_000)]
LongName = Annotated[str, Meta(min_length=1, max_length=256)]

MAX_OUTBOX: Final = 1_000
"""Mails that one record sends. All of a record has to fit into one message of the broker."""
MAX_SENDERS: Final = 1_024
"""Senders whose last number is remembered; the one that was silent for longest is forgotten first."""
MAX_RECENT: Final = 64
"""Ids of mails without a number that are remembered."""
MAX_CANCELLED: Final = 256
"""Mails and conversations that an agent was told to give up."""
MAX_QUESTIONS: Final = 1_024
"""Questions of one agent that wait for an answer."""
STEPS: Final = 1_024
"""Numbers that one version of a state has for its mails: more than `MAX_OUTBOX`."""

Control = Literal["stop", "pause", "resume", "cancel"]
CONTROL: Final[tuple[Control, ...]] = ("stop", "pause", "resume", "cancel")
"""Kinds that the control lane knows. `stop` ends the running handler after its grace, `pause` lets it finish;
both pull no more work until `resume`, over restarts too. `cancel` ends one mail for good."""

NoticeKind = Literal["undelivered", "expired", "failed", "hop_limit", "cancelled"]
NOTICES: Final[tuple[NoticeKind, ...]] = ("undelivered", "expired", "failed", "hop_limit", "cancelled")
"""Kinds by which a sender is told, on its reply lane, that a mail of its will not be handled. `body` is a `Notice`."""

ESCALATION: Final = "escalation"
"""Kind of the mail that says that a mail died; `body` is an `Escalation`."""
ANSWER: Final = "answer"
"""Kind of an answer, on the asker's reply lane; `in_reply_to` is the question's id."""
CALL_ANSWER: Final = "call-answer"
"""Kind of a gateway's answer to a governed call; `in_reply_to` is the asking's id and `body` is a `CallAnswer`."""
GATEWAY: Final = "gateway"
"""Sender of answers to governed calls: no agent may have this name."""
OPERATOR: Final = "operator"
"""Sender of whoever sends from a command line and gives no name."""


class Mail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message to an agent.

    `seq` is the sender's own number, growing with each mail that it sends: the receiver remembers the last one, so
    a mail that is sent or delivered again is recognised. It is 0 for senders without a committed state; those are
    recognised by `id`, among the last `MAX_RECENT`.
    """

    id: Token
    to: Token
    sender: Token
    kind: Kind
    body: Raw = Raw(b"null")
    lane: MailLane = "work"
    conversation: LongName | None = None
    """Mails that follow from one another share it."""
    task: LongName | None = None
    hops: Hops = 0
    """How many mails went before it, each sent because of the one before."""
    seq: Count = 0
    in_reply_to: Token | None = None
    reply_to: Token | None = None
    """The agent whose reply lane gets the answer."""
    request: Token | None = None
    """The answer is kept on `hr.replies.<request>`, for whoever fetches it."""
    deadline_us: Micros | None = None
    """After it the mail is not handled, and its sender is told."""
    budget: Token | None = None
    """The budget that pays for what is done about it."""
    created_us: Micros = 0
    traceparent: Annotated[str, Meta(max_length=64)] | None = None


# --- an agent's committed state ---------------------------------------------------------------------


class ReturnAddress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the answer to a mail goes: to an agent's reply lane, to a kept answer, or both."""

    mail: Token
    agent: Token | None = None
    request: Token | None = None
    deadline_us: Micros | None = None
    """That of the mail."""


class Question(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question that waits for its answer: how to go on then. The question's own id is its key.

    `then` is the kind of the handler that gets the answer, `otherwise` that of the one that gets a notice in its place.
    `saved` is restored as it was given; `origin` is whom that handler's own answer is for.
    """

    to: Token
    then: Kind
    otherwise: Kind | None = None
    saved: Raw = Raw(b"null")
    origin: ReturnAddress | None = None
    conversation: LongName | None = None
    task: LongName | None = None
    hops: Hops = 0
    deadline_us: Micros | None = None
    budget: Token | None = None
    asked_us: Micros = 0


class MailError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why there is no answer: `code` is stable, the text is for people."""

    code: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}" + END)]
    message: ShortText = ""


class MailReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a request, on `hr.replies.<request>`: `body`, or `error` if there is none."""

    request: Token
    agent: Token
    """Who answered."""
    body: Raw = Raw(b"null")
    error: MailError | None = None
    conversation: LongName | None = None
    task: LongName | None = None
    at_us: Micros = 0


class AgentState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that an agent knows, as of `version`: written whole, with the sequence of the version before as expectation.

    What is bounded: `outbox` by `MAX_OUTBOX`, `seen` by `MAX_SENDERS` (a sender repeats only the mails of its last
    record, so one that was silent while so many others wrote has nothing to repeat unless it is down since),
    `recent`, `cancelled` and `questions` by `MAX_RECENT`, `MAX_CANCELLED` and `MAX_QUESTIONS`; and all together by the
    broker's largest message.
    """

    agent: Token
    version: Count
    owner: Token
    """The run that wrote it. Another one took over if the last record is not its own."""
    state: Raw = Raw(b"null")
    settles: Token | None = None
    """The mail whose handling this version is."""
    outbox: Annotated[list[Mail], Meta(max_length=MAX_OUTBOX)] = []
    """What it sends: published after this record is stored, and again by whoever finds it as the last one."""
    replies: Annotated[list[MailReply], Meta(max_length=MAX_OUTBOX)] = []
    """Answers that it keeps for their askers: published as the outbox is."""
    seen: Annotated[dict[Token, Count], Meta(max_length=MAX_SENDERS)] = {}
    """The last number of each sender on the work lane, the most recent sender last."""
    recent: Annotated[list[Token], Meta(max_length=MAX_RECENT)] = []
    """Ids of mails without a number that were handled, the most recent one last."""
    questions: Annotated[dict[Token, Question], Meta(max_length=MAX_QUESTIONS)] = {}
    cancelled: Annotated[list[LongName], Meta(max_length=MAX_CANCELLED)] = []
    """Ids of mails and conversations that are not to be handled any more, the most recent one last."""
    stopped: bool = False
    """It pulls no work until it is resumed."""
    at_us: Micros = 0


# --- bodies of what the mesh itself sends -------------------------------------------------------------


class Notice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a notice: which mail will not be handled, and why."""

    mail: Token
    to: Token
    kind: Kind
    error: MailError
    tries: Count = 0


class Escalation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an escalation: what died where, with its body if that is not too large."""

    agent: Token
    mail: Token
    sender: Token
    kind: Kind
    error: MailError
    tries: Count = 0
    body: Raw = Raw(b"null")


class ControlBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a control mail. `mail` and `conversation` say what `cancel` ends; `grace_s` is for `stop`."""

    mail: Token | None = None
    conversation: LongName | None = None
    grace_s: Annotated[float, Meta(ge=0, le=3_600)] | None = None
    why: ShortText = ""
