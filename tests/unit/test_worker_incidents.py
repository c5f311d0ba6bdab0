"""The rules of triage: how many engines a culprit costs, and that its neighbours outlive it."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from headrace.contracts.suspects import Suspect
from headrace.inference_worker.apart import newest
from headrace.inference_worker.incidents import (
    Incident,
    after_crash,
    is_convicted,
    is_suspect,
    may_be_cleared,
    sentence,
)

BASE = {"stored_us": 7, "error": "it broke", "worker": "w", "started_us": 1}


def crash(known: Suspect | None, incident: str, *, alone: bool) -> Suspect:
    return after_crash(known, incident=incident, alone=alone, **BASE)


def test_one_crash_makes_a_suspect_and_two_with_the_last_alone_a_convict() -> None:
    first = crash(None, "a", alone=False)
    assert (first.crashes, first.before, is_suspect(first), is_convicted(first)) == (1, "none", True, False)
    second = crash(first, "b", alone=True)
    assert (second.crashes, second.before, is_convicted(second)) == (2, "a", True)
    assert "2 engines died" in sentence(second)
    assert "it broke" in sentence(second)


def test_one_that_only_raised_is_nobodys_suspect() -> None:
    assert not is_suspect(None)
    assert not is_suspect(Suspect(stored_us=1, error="refused"))


def test_alone_the_first_time_is_no_proof() -> None:
    assert not is_convicted(crash(None, "a", alone=True))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=12))
def test_each_crash_counts_once_and_only_an_end_alone_convicts(crashes) -> None:
    record = None
    told: list[str] = []
    for incident, alone in crashes:
        if told and told[-1] == incident:
            assert crash(record, incident, alone=alone) is record, "the same crash, told again"
            continue
        told.append(incident)
        record = crash(record, incident, alone=alone)
        assert record.crashes == len(told)
        assert is_convicted(record) == (len(told) >= 2 and alone)


@given(crashes=st.integers(1, 5), delivered=st.integers(1, 6), tries=st.integers(1, 6))
def test_who_is_cleared_has_been_in_one_crash_and_has_a_try_left_to_be_tried_alone(
    crashes, delivered, tries
) -> None:
    record = Suspect(stored_us=1, crashes=crashes, incident="a")
    assert may_be_cleared(record, delivered, tries) == (crashes == 1 and delivered < tries)


class Thing:
    """Stands for an item: an incident only keeps it."""


def test_an_incident_ends_when_the_last_is_out() -> None:
    items = [Thing() for _ in range(3)]
    incident = Incident("why", items)
    assert not incident.alone
    assert not incident.left(items[0], suspect=True)
    assert not incident.left(items[1], suspect=False)
    assert incident.left(items[2], suspect=True)
    assert incident.suspects == [items[0], items[2]]
    assert Incident("why", items[:1]).alone
    assert len({Incident("", []).id for _ in range(50)}) == 50


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_who_was_started_last_is_tried_first(times) -> None:
    items = [SimpleNamespace(order_us=t) for t in times]
    assert newest(items).order_us == max(times)
