"""What a handler may raise, and what it may meet: each with its stable `code`."""

from __future__ import annotations

from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError


class RetryLater(HeadraceError):
    """Raise it when something that the handler needs is away: it runs again after `delay_s` seconds.

    That counts as no try, so it never makes a dead letter; the message's deadline ends it.
    """

    code = "retry_later"

    def __init__(self, message: str = "", *, delay_s: float = 1.0) -> None:
        super().__init__(message or "not now")
        self.delay_s = max(0.05, delay_s)


class CallError(HeadraceError):
    """A governed call has no outcome. `answer` is what the gateway said."""

    def __init__(self, message: str, *, code: str, answer: CallAnswer) -> None:
        super().__init__(message, code=code)
        self.answer = answer


class CallRefused(CallError):
    """It was not made: policy, budget, an unknown callee, a body that does not fit."""


class CallFailed(CallError):
    """The callee refused it, or every try failed: it did not happen, and cost nothing."""


class CallInDoubt(CallError):
    """It may have happened. It is never repeated by itself; `headrace calls resolve` ends the doubt."""


class CallConflict(CallError):
    """The same step asked for something else before: what a handler calls has to follow from its message alone."""


class AskFailed(HeadraceError):
    """A question has no answer: it was undelivered, expired, or its handler failed. `code` says which."""


class AskTimeout(HeadraceError):
    """No answer within the time. Asking again in the next try gets an answer that came meanwhile."""

    code = "no_answer"


class Fenced(HeadraceError):
    """Another run of this agent has taken over: nothing that this one does counts any more."""

    code = "fenced"
