"""Sent again, delivered again, forgotten, given up, redriven: one effect for each mail, in its sender's order.

A model of the work lane with the real memory of a receiver: the queue is the stream, a record is what survives a crash.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from headrace.agent.intake import Memory, is_numbered
from headrace.contracts.mail import MAX_RECENT, MAX_SENDERS, STEPS, AgentState, Mail

SENDERS = ("a", "b")


class Send(Struct, frozen=True):
    """A sender commits mails, and dies when `stored` of them are published; then it starts again, and sends all."""

    sender: str
    count: int
    stored: int


class SendAgain(Struct, frozen=True):
    """A sender starts again, and publishes the last record's mails."""

    sender: str


class Outside(Struct, frozen=True):
    """Somebody without a state sends a mail, and may send it again at once."""

    times: int


class Deliver(Struct, frozen=True):
    """The receiver gets the first of the queue; then this happens."""

    what: Literal["done", "dies before the record", "dies before the ack", "gives up", "forgets"]


class Redrive(Struct, frozen=True):
    """An operator sends a dead letter once more."""

    which: int


STEP = st.one_of(
    st.builds(Send, st.sampled_from(SENDERS), st.integers(1, 3), st.integers(0, 3)),
    st.builds(SendAgain, st.sampled_from(SENDERS)),
    st.builds(Outside, st.integers(1, 2)),
    st.builds(
        Deliver,
        st.sampled_from(
            ["done", "done", "dies before the record", "dies before the ack", "gives up", "forgets"]
        ),
    ),
    st.builds(Redrive, st.integers(0, 5)),
)


class World:
    def __init__(self) -> None:
        self.queue: list[tuple[Mail, bool]] = []
        self.outbox: dict[str, list[Mail]] = {sender: [] for sender in SENDERS}
        self.version = dict.fromkeys(SENDERS, 0)
        self.sent: list[Mail] = []
        self.dead: list[Mail] = []
        self.effects: list[Mail] = []
        self.redriven: set[str] = set()
        self.record = AgentState(agent="r", version=1, owner="o")
        self.memory = Memory(self.record)

    def step(self, step: Send | SendAgain | Outside | Deliver | Redrive) -> None:
        match step:
            case Send(sender, count, stored):
                self.version[sender] += 1
                first = self.version[sender] * STEPS
                mails = [
                    Mail(id=f"{sender}{first + i}", to="r", sender=sender, kind="k", seq=first + i)
                    for i in range(count)
                ]
                self.sent += mails
                self.outbox[sender] = mails
                self.queue += [(mail, False) for mail in mails[:stored]]
                self.queue += [(mail, False) for mail in mails]
            case SendAgain(sender):
                self.queue += [(mail, False) for mail in self.outbox[sender]]
            case Outside(times):
                mail = Mail(id=f"o{len(self.sent)}", to="r", sender="outside", kind="k")
                self.sent.append(mail)
                self.queue += [(mail, False)] * times
            case Redrive(which) if self.dead:
                mail = self.dead.pop(which % len(self.dead))
                self.redriven.add(mail.id)
                self.queue.append((mail, True))
            case Deliver(what) if self.queue:
                self.deliver(what)
            case _:
                pass

    def deliver(self, what: str) -> None:
        mail, redriven = self.queue[0]
        if self.memory.knows(mail, redriven=redriven):
            self.queue.pop(0)
        elif what in ("done", "dies before the ack"):
            self.record = self.memory.written(self.record, mail, redriven=redriven)
            self.effects.append(mail)
            if what == "done":
                self.memory.note(mail, redriven=redriven)
                self.queue.pop(0)
            else:
                self.memory = Memory(self.record)
        elif what == "gives up" and not (mail.seq == 0 and self.in_queue_again(mail)):
            self.dead.append(mail)
            if is_numbered(mail, redriven=redriven):
                self.record = self.memory.written(self.record, mail, redriven=redriven)
                self.memory.note(mail, redriven=redriven)
            self.queue.pop(0)
        else:
            self.memory = Memory(self.record)

    def in_queue_again(self, mail: Mail) -> bool:
        """Without a number, a copy that is still queued would be handled beside the dead letter: the stream's own
        window keeps such copies out, which the model does not have.
        """
        return any(other.id == mail.id for other, _ in self.queue[1:])


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_each_mail_has_one_effect_in_its_senders_order(
    steps: list[Send | SendAgain | Outside | Deliver | Redrive],
) -> None:
    world = World()
    for step in steps:
        world.step(step)
    while world.queue or world.dead:
        world.step(Deliver("done") if world.queue else Redrive(0))
    done = [mail.id for mail in world.effects]
    assert sorted(done) == sorted(mail.id for mail in world.sent)
    for sender in SENDERS:
        in_order = [m.seq for m in world.effects if m.sender == sender and m.id not in world.redriven]
        assert in_order == sorted(in_order)


def test_what_is_remembered_is_bounded() -> None:
    memory = Memory(AgentState(agent="r", version=1, owner="o"))
    for n in range(MAX_SENDERS + 10):
        memory.note(Mail(id=f"m{n}", to="r", sender=f"s{n}", kind="k", seq=1), redriven=False)
        memory.note(Mail(id=f"o{n}", to="r", sender="outside", kind="k"), redriven=False)
    assert len(memory.seen) == MAX_SENDERS
    assert len(memory.recent) == MAX_RECENT
    last = MAX_SENDERS + 9
    assert memory.knows(Mail(id="x", to="r", sender=f"s{last}", kind="k", seq=1), redriven=False)
    assert not memory.knows(Mail(id="x", to="r", sender=f"s{last}", kind="k", seq=2), redriven=False)
    assert not memory.knows(Mail(id="x", to="r", sender="s0", kind="k", seq=1), redriven=False)
    assert memory.knows(Mail(id=f"o{last}", to="r", sender="outside", kind="k"), redriven=False)


def test_a_number_says_nothing_on_lanes_without_order() -> None:
    memory = Memory(AgentState(agent="r", version=1, owner="o", seen={"a": 9}))
    assert not memory.knows(Mail(id="x", to="r", sender="a", kind="k", seq=3, lane="reply"), redriven=False)
