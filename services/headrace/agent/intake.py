"""Is this a mail, is it meant for us, was it handled before? What it says of its sender is checked by its subject."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.contracts import codec
from headrace.contracts.codec import REDRIVEN
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.contracts.mail import MAX_RECENT, MAX_SENDERS, AgentState, Mail
from headrace.contracts.subjects import Subjects
from headrace.mesh.consumer import Delivery


def read_mail(subjects: Subjects, delivery: Delivery) -> Mail:
    """The mail of a delivery; raise `Undecodable` for what is none, or names another sender, receiver or lane."""
    mail = codec.MAIL.decode(delivery.data, delivery.headers)
    try:
        meant = subjects.mail(mail.to, mail.lane, mail.sender)
    except HeadraceError as e:
        raise Undecodable(str(e)) from None
    if meant != delivery.subject:
        raise Undecodable("the mail names another sender, receiver or lane than its subject")
    return mail


def is_redriven(headers: Mapping[str, str] | None) -> bool:
    """Whether it comes from the dead letters."""
    return bool(headers) and REDRIVEN in headers


class Memory:
    """What was settled: the last number of each sender on the work lane, and ids of what has no number.

    Kept here for what a handler without effects settled, and committed with the next record.
    """

    def __init__(self, record: AgentState) -> None:
        self.seen = dict(record.seen)
        self.recent = dict.fromkeys(record.recent)

    def knows(self, mail: Mail, *, redriven: bool) -> bool:
        """Whether this mail was settled before."""
        if is_numbered(mail, redriven=redriven):
            return mail.seq <= self.seen.get(mail.sender, 0)
        return mail.id in self.recent

    def note(self, mail: Mail, *, redriven: bool) -> None:
        """This mail is settled."""
        _note(self.seen, self.recent, mail, redriven=redriven)

    def written(self, record: AgentState, mail: Mail, *, redriven: bool) -> AgentState:
        """`record` with all that is settled, and with `mail`."""
        seen, recent = self.seen.copy(), self.recent.copy()
        _note(seen, recent, mail, redriven=redriven)
        return replace(record, seen=seen, recent=list(recent))


def is_numbered(mail: Mail, *, redriven: bool) -> bool:
    """Whether a mail is known by its number, and not by its id."""
    # Other lanes deliver several at once and out of order: there a number says nothing of those before it.
    return mail.seq > 0 and mail.lane == "work" and not redriven


def _note(seen: dict[str, int], recent: dict[str, None], mail: Mail, *, redriven: bool) -> None:
    if is_numbered(mail, redriven=redriven):
        last = seen.pop(mail.sender, 0)  # in again at the end: the order is that of the last mail
        seen[mail.sender] = max(last, mail.seq)
        if len(seen) > MAX_SENDERS:
            del seen[next(iter(seen))]
    else:
        recent.pop(mail.id, None)
        recent[mail.id] = None
        if len(recent) > MAX_RECENT:
            del recent[next(iter(recent))]
