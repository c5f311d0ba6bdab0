"""What becomes of a mail, case by case: no broker is needed to say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from headrace.agent import Agent, Context
from headrace.agent.judging import Dies, Ends, Runs, Unheard, case_of, judge
from headrace.contracts.codec import REDRIVEN
from headrace.contracts.mail import AgentState, Mail, Question, ReturnAddress

NOW = 1_000_000
AGENT = Agent("a")
MAIL = Mail(id="m", to="a", sender="b", kind="number", body=Raw(b"3"), conversation="c")
ANSWER = replace(MAIL, kind="answer", lane="reply", in_reply_to="q", body=Raw(b"4"))
QUESTION = Question(to="b", then="number", otherwise="none", origin=ReturnAddress(mail="m-0", request="r"))
ASKED = AgentState(agent="a", version=1, owner="o", questions={"q": QUESTION})


@AGENT.on("number")
async def number(ctx: Context[dict[str, int]], msg: int) -> None: ...


@AGENT.on("none")
async def none(ctx: Context[dict[str, int]]) -> None: ...


@AGENT.on("failed")
async def failed(ctx: Context[dict[str, int]]) -> None: ...


def verdict(
    mail: Mail, record: AgentState | None = None, *, delivered: int = 1, redriven: bool = False
) -> Any:
    delivery: Any = SimpleNamespace(delivered=delivered, headers={REDRIVEN: "1"} if redriven else None)
    record = record or AgentState(agent="a", version=1, owner="o")
    case = case_of("a", record, delivery, mail)
    return judge(case, AGENT, record, max_tries=3, max_hops=5, last_error="it broke", at_us=NOW)


def test_a_handler_gets_its_body_decoded() -> None:
    runs = verdict(MAIL)
    assert isinstance(runs, Runs)
    assert (runs.handler.kind, runs.body) == ("number", 3)
    assert verdict(replace(MAIL, kind="none")).body == 3, "without a type: JSON as it comes"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"kind": "other"}, "no_handler"),
        ({"body": Raw(b'"three"')}, "undecodable"),
        ({"body": Raw(b'"\xff"')}, "undecodable"),
        ({"hops": 6}, "hop_limit"),
    ],
)
def test_what_dies(changed: dict[str, Any], code: str) -> None:
    dies = verdict(replace(MAIL, **changed))
    assert isinstance(dies, Dies)
    assert dies.error.code == code
    assert dies.kind == ("hop_limit" if code == "hop_limit" else "failed")


def test_tries_are_counted_before_the_handler_runs() -> None:
    assert isinstance(verdict(MAIL, delivered=3), Runs)
    dies = verdict(MAIL, delivered=4)
    assert isinstance(dies, Dies)
    assert dies.error.code == "tries_exhausted"
    assert "it broke" in dies.detail
    assert "it broke" not in dies.error.message


def test_what_ends() -> None:
    assert isinstance(verdict(replace(MAIL, deadline_us=NOW)), Runs)
    late = replace(MAIL, deadline_us=NOW - 1)
    assert verdict(late).kind == "expired"
    assert isinstance(verdict(late, redriven=True), Runs), "an operator wants it all the same"
    for name in ("m", "c"):
        told = AgentState(agent="a", version=1, owner="o", cancelled=[name])
        assert isinstance(verdict(MAIL, told), Ends)
        assert verdict(MAIL, told).kind == "cancelled"


def test_an_answer_runs_the_handler_that_its_question_named() -> None:
    runs = verdict(ANSWER, ASKED)
    assert isinstance(runs, Runs)
    assert (runs.handler.kind, runs.body) == ("number", 4)
    for sender in ("b", "a"):  # undelivered and expired questions are told by the asker to itself
        notice = replace(ANSWER, kind="expired", sender=sender, body=Raw(b"{}"))
        assert verdict(notice, ASKED).handler.kind == "none"
    alone = replace(ASKED, questions={"q": replace(QUESTION, otherwise=None)})
    assert verdict(replace(ANSWER, kind="failed"), alone).handler.kind == "failed"
    assert isinstance(verdict(replace(ANSWER, kind="expired"), alone), Unheard)


def test_nobody_answers_for_another() -> None:
    assert isinstance(verdict(replace(ANSWER, sender="forger"), ASKED), Unheard)
    assert isinstance(verdict(ANSWER), Unheard), "and what was never asked has no answer"
    assert isinstance(verdict(replace(ANSWER, lane="work"), ASKED), Dies), "work is no answer"
