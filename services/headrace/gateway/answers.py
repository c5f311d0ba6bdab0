"""What a call's asker is told: made from the call's records, or from why there are none."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from headrace.contracts.account import CallView
from headrace.contracts.calls import AnswerUsage, CallAnswer
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import AttemptFailed, CallError, CallOutcome, Completed, Failed, InDoubt


def answer_of(view: CallView, *, replayed: bool = False, live: CallOutcome | None = None) -> CallAnswer:
    """The answer that a call's records give; `replayed`: they were there before this asking.

    `live` is what its callee just said: the caller gets that, if it is what the record tells of.
    """
    end = view.last.end
    common: dict[str, Any] = {
        "call_id": view.call, "attempt": len(view.attempts), "replayed": replayed,
        "held_micro": held_micro(view), "posted_micro": posted_micro(view),
    }  # fmt: skip
    match view.state, end:
        case "completed", Completed(outcome=outcome, usage=usage):
            outcome = live if live is not None and live.digest == outcome.digest else outcome
            return CallAnswer(
                **common, state="completed", outcome=_plain(outcome), usage=AnswerUsage(**asdict(usage))
            )
        case "in_doubt", Failed(error=error) | AttemptFailed(error=error) | InDoubt(error=error):
            return CallAnswer(**common, state="in_doubt", error=_plain(error))
        case "failed", Failed(error=error):
            return CallAnswer(**common, state="failed", error=_plain(error))
        case _:
            return CallAnswer(**common, state="in_progress")


def held_micro(view: CallView) -> int:
    """Money that a call holds, in micro-units: what its open and doubtful attempts may cost at most."""
    return sum(a.intent.max_cost_micro for a in view.attempts if a.held)


def posted_micro(view: CallView) -> int:
    """Money that a call has cost, in micro-units."""
    return sum(a.end.cost_micro for a in view.attempts if isinstance(a.end, Completed | Failed))


def refused(call: str, error: HeadraceError) -> CallAnswer:
    """Nothing was called, and nothing is held."""
    return CallAnswer(call_id=call, state="refused", error={"type": error.code, "message": str(error)})


def conflict(call: str) -> CallAnswer:
    """The key stands for another call."""
    message = "the key was used with another body, callee or operation"
    return CallAnswer(call_id=call, state="conflict", error={"type": "key_reused", "message": message})


def in_progress(call: str) -> CallAnswer:
    """It is under way, and nothing of it is written yet."""
    return CallAnswer(call_id=call, state="in_progress")


def _plain(value: CallOutcome | CallError) -> dict[str, Any]:
    return {k: v for k, v in asdict(value).items() if v is not None}
