"""The table of streams and consumers: what would lose, hide or overlap work is not in it (as case A6)."""

from __future__ import annotations

from itertools import combinations

import pytest

from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import Lane
from headrace.contracts.subjects import Subjects
from headrace.contracts.topology import Topology

TOPOLOGY = Topology(ack_wait_s=10.0)
STREAMS = TOPOLOGY.streams()
FUNCTIONS = [
    FunctionSpec(name="generate"),
    FunctionSpec(name="rows", min_shape=0, max_shape=0),
    FunctionSpec(name="gen"),
]
CONSUMERS = TOPOLOGY.completion_consumers() + [c for f in FUNCTIONS for c in TOPOLOGY.function_consumers(f)]


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both filters."""
    a, b = one.split("."), other.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(a) == len(b)


def test_the_test_itself_knows_what_overlaps():
    assert overlap("a.>", "a.b")
    assert overlap("a.*.c", "a.b.*")
    assert not overlap("a.b", "a.c")
    assert not overlap("a.*", "a.b.c")


def test_no_two_streams_take_the_same_subject():
    subjects = [subject for stream in STREAMS for subject in stream.subjects]
    for one, other in combinations(subjects, 2):
        assert not overlap(one, other), (one, other)


def test_no_stream_takes_the_front_door():
    """A stream would answer a request with its PubAck, and the asker would take that for the answer."""
    for stream in STREAMS:
        for subject in stream.subjects:
            assert not overlap(subject, "hr.api.>")


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_queue_refuses_when_it_is_full_and_never_drops(stream):
    assert stream.discard == "new"
    if stream.retention == "workqueue":
        assert stream.max_age == 0
        assert stream.max_msgs == -1
        assert stream.max_msgs_per_subject == -1 or stream.discard_new_per_subject
        assert stream.allow_atomic


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_every_stream_is_on_disk_and_its_window_fits_its_age(stream):
    config = stream.config(replicas=3)
    assert config["storage"] == "file"
    assert config["num_replicas"] == 3
    assert not config["max_age"] or config["duplicate_window"] <= config["max_age"]


def test_consumers_of_a_work_queue_do_not_overlap():
    queues = {stream.name for stream in STREAMS if stream.retention == "workqueue"}
    for one, other in combinations([c for c in CONSUMERS if c.stream in queues], 2):
        if one.stream == other.stream:
            assert not overlap(one.filter_subject, other.filter_subject), (one.durable, other.durable)


def test_no_consumer_takes_a_manifest():
    for consumer in CONSUMERS:
        assert not overlap(consumer.filter_subject, "hr.tasks.manifest.j")


def test_a_function_named_manifest_does_not_overlap_the_manifests():
    for consumer in TOPOLOGY.function_consumers(FunctionSpec(name="manifest")):
        assert not overlap(consumer.filter_subject, "hr.tasks.manifest.j")


def test_consumers_have_their_own_names_and_explicit_acks_without_a_last_try():
    names = [(consumer.stream, consumer.durable) for consumer in CONSUMERS]
    assert len(names) == len(set(names))
    streams = {stream.name: stream for stream in STREAMS}
    for consumer in CONSUMERS:
        config = consumer.config()
        assert config["ack_policy"] == "explicit"
        assert config["max_deliver"] == -1
        assert config["ack_wait"] == 10_000_000_000
        assert any(overlap(consumer.filter_subject, subject) for subject in streams[consumer.stream].subjects)


def test_every_task_of_a_function_has_exactly_one_consumer():
    spec = FUNCTIONS[0]
    for lane in Lane:
        for tokens in (0, 1, 2, 63, 64, 65, 8192, 1_000_000):
            shape = spec.clamp_shape(0 if not tokens else (tokens - 1).bit_length())
            subject = TOPOLOGY.subjects.task(spec.name, lane, shape, "j")
            assert (
                len(
                    [
                        c
                        for c in CONSUMERS
                        if overlap(c.filter_subject, subject) and c.stream == TOPOLOGY.tasks
                    ]
                )
                == 1
            )


def test_meshes_of_two_prefixes_share_nothing():
    other = Topology(Subjects("staging"))
    assert not {s.name for s in STREAMS} & {s.name for s in other.streams()}
    for one in STREAMS:
        for two in other.streams():
            assert not any(overlap(a, b) for a in one.subjects for b in two.subjects)
