"""What a context reaches, and what it collects: the seam at which a test takes the place of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Raw, Struct

from headrace.agent.errors import CallConflict, CallError, CallFailed, CallInDoubt, CallRefused
from headrace.contracts.calls import CallAnswer
from headrace.contracts.mail import Mail, MailReply, Question

if TYPE_CHECKING:
    from headrace.agent.context import Context


class Asked(Struct, frozen=True, kw_only=True):
    """A governed call as a handler asks for it."""

    key: str
    callee: str
    body: Raw
    message: Mail
    step: str
    deadline_us: int | None
    traceparent: str | None


class Called(Struct, frozen=True, kw_only=True):
    """A governed call that was answered: `body` is what the callee said, `answer` all that the gateway says of it."""

    body: Any
    answer: CallAnswer

    @property
    def replayed(self) -> bool:
        """Whether the outcome was there before this asking."""
        return self.answer.replayed


class Port(Protocol):
    """What a context needs of the world: the runner's, or a test's."""

    def again(self) -> Port:
        """The port of another run of the same handler."""
        ...

    async def call(self, asked: Asked) -> CallAnswer:
        """Ask the gateway, and return its last word."""
        ...

    async def ask_now(self, question: Mail, timeout_s: float) -> MailReply:
        """Send a question and return its answer; raise `AskTimeout`."""
        ...

    def record(self, context: Context[Any], kind: str, name: str | None, data: Any) -> None:
        """Note what the agent did; never waits."""
        ...


class Effects(Struct, kw_only=True):
    """What a handler has asked for so far."""

    mails: list[Mail] = []
    replies: list[MailReply] = []
    questions: dict[str, Question] = {}
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.mails or self.replies or self.questions)


def call_error(answer: CallAnswer, callee: str) -> CallError:
    """The error that stands for an answer without an outcome."""
    said = answer.error or {}
    code, text = str(said.get("type") or answer.state), str(said.get("message") or answer.state)
    kind = {"refused": CallRefused, "in_doubt": CallInDoubt, "conflict": CallConflict}.get(
        answer.state, CallFailed
    )
    msg = f"call of {callee}: {text} (call {answer.call_id})"
    return kind(msg, code=code, answer=answer)
