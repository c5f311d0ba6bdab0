"""Bounds of mail, and its subjects."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.errors import InvalidInput, Undecodable
from headrace.contracts.mail import MAX_OUTBOX, STEPS, AgentState, Mail
from headrace.contracts.subjects import Subjects
from headrace.contracts.topology import Topology

SMALL = Mail(id="m", to="a", sender="b", kind="k", body=Raw(b'{"x":1}'))


def test_a_mail_stands_on_a_subject_that_names_its_sender() -> None:
    subjects = Subjects()
    assert subjects.mail("a", "work", "b") == "hr.mail.a.work.b"
    assert subjects.mail_lane("a", "reply") == "hr.mail.a.reply.*"
    assert subjects.mail_of("a") == "hr.mail.a.>"
    for agent, lane, sender in (
        ("a", "other", "b"),
        ("a.b", "work", "c"),
        ("a", "work", "*"),
        ("", "work", "b"),
    ):
        with pytest.raises(InvalidInput):
            subjects.mail(agent, lane, sender)


def test_work_is_leased_one_by_one_and_the_other_lanes_are_not() -> None:
    topology = Topology()
    assert topology.mail_consumer("a", "work").max_ack_pending == 1
    assert topology.mail_consumer("a", "reply").max_ack_pending > 1
    assert topology.mail_consumer("a", "work").filter_subject == "hr.mail.a.work.*"


def test_numbers_of_one_version_are_below_those_of_the_next() -> None:
    assert STEPS > MAX_OUTBOX
    assert (4_102_444_800_000 + 1) * STEPS < 2**53, "until the year 2100 at least"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "a.b"},
        {"to": "a b"},
        {"kind": "a kind"},
        {"kind": ""},
        {"lane": "other"},
        {"hops": -1},
        {"seq": 2**53},
        {"conversation": ""},
        {"conversation": "c" * 257},
        {"request": "r.*"},
        {"deadline_us": -1},
        {"traceparent": "t" * 65},
    ],
)
def test_what_a_mail_may_not_be(wrong: dict[str, object]) -> None:
    fields = msgspec.json.decode(codec.MAIL.encode(SMALL)) | wrong
    with pytest.raises(Undecodable):
        codec.MAIL.decode(msgspec.json.encode(fields))


def test_a_record_sends_so_many_mails_at_most() -> None:
    state = AgentState(agent="a", version=1, owner="o", outbox=[SMALL] * MAX_OUTBOX)
    assert len(codec.AGENT_STATE.decode(codec.AGENT_STATE.encode(state)).outbox) == MAX_OUTBOX
    with pytest.raises(Undecodable):
        codec.AGENT_STATE.decode(
            codec.AGENT_STATE.encode(msgspec.structs.replace(state, outbox=[SMALL] * 1_001))
        )


def test_a_body_that_is_absent_is_null() -> None:
    assert bytes(codec.MAIL.decode(b'{"id":"m","to":"a","sender":"b","kind":"k"}').body) == b"null"
