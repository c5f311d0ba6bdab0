"""Subjects: what may stand in one, shapes, and taking them apart (case B12)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import Lane, check_token
from headrace.contracts.subjects import MAX_SHAPE, Subjects, TaskAddress, shape_of

S = Subjects()
tokens = st.from_regex(r"[A-Za-z0-9_-]{1,128}", fullmatch=True)
BAD = [
    "",
    "*",
    ">",
    "a.b",
    "a b",
    "a*",
    ">a",
    ".",
    "a\n",
    "\n",
    "a\x00",
    "ä",
    "a\t",
    "$SYS",
    "a/b",
    "x" * 129,
    "a\u200b",
]
BUILDERS = {
    "job": [
        lambda bad: S.task("f", "normal", 6, bad),
        S.tasks_of_job,
        S.manifest,
        S.results_of_job,
        lambda bad: S.result("job", "f", bad),
        lambda bad: S.job_event(bad, "opened"),
    ],
    "function": [
        lambda bad: S.task(bad, "normal", 6, "j"),
        lambda bad: S.tasks_of_shape(bad, "normal", 6),
        lambda bad: S.result("job", bad, "j"),
    ],
    "sink": [lambda bad: S.result(bad, "f", "j"), S.results_of_sink],
    "event": [lambda bad: S.job_event("j", bad)],
    "origin": [S.dead],
    "prefix": [Subjects],
}
CASES = [(field, build, bad) for field, builds in BUILDERS.items() for build in builds for bad in BAD]


@pytest.mark.parametrize(("field", "build", "bad"), CASES)
def test_b12_a_bad_token_is_refused_and_named(field, build, bad):
    with pytest.raises(InvalidInput) as caught:
        build(bad)
    assert caught.value.field == field
    assert caught.value.code == "invalid_name"
    assert field in str(caught.value)
    assert repr(bad)[:100] in str(caught.value)


@pytest.mark.parametrize("bad", [None, 5, b"job", ["job"]])
def test_a_token_that_is_no_text_is_refused(bad):
    with pytest.raises(InvalidInput):
        check_token("job", bad)


def test_an_endpoint_may_have_several_tokens_each_checked():
    assert S.api("agents.prompt.bob") == "hr.api.agents.prompt.bob"
    for bad in ("", "a..b", "a.*", ".a", "a.>"):
        with pytest.raises(InvalidInput):
            S.api(bad)


@pytest.mark.parametrize("bad", ["", "fast", "*", "NORMAL"])
def test_an_unknown_lane_is_refused_with_the_known_ones(bad):
    with pytest.raises(InvalidInput, match="urgent, normal, bulk"):
        S.task("f", bad, 6, "j")


@pytest.mark.parametrize("bad", [-1, MAX_SHAPE + 1])
def test_a_shape_out_of_range_is_refused(bad):
    with pytest.raises(InvalidInput, match="shape"):
        S.task("f", "normal", bad, "j")


@given(tokens, st.sampled_from(Lane), st.integers(0, MAX_SHAPE), tokens)
def test_a_task_subject_comes_apart_as_it_was_put_together(function, lane, shape, job):
    subject = S.task(function, lane, shape, job)
    assert S.parse_task(subject) == TaskAddress(function, lane, shape, job)
    assert matches(S.tasks_of_shape(function, lane, shape), subject)
    assert matches(S.tasks_of_job(job), subject)
    assert not matches(S.tasks_of_job(job), S.manifest(job))


@given(st.text())
def test_any_other_subject_is_refused_and_never_raises_anything_else(subject):
    with pytest.raises(InvalidInput):
        S.parse_task(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "hr.tasks.manifest.j",
        "hr.tasks.f.normal.t6",
        "hr.tasks.f.slow.t6.j",
        "hr.tasks.f.normal.6.j",
        "hr.tasks.f.normal.tx.j",
        "hr.tasks.f.normal.t1_0.j",
        "hr.tasks.f.normal.t٣.j",
        "hr.tasks.f.normal.t99.j",
        "xx.tasks.f.normal.t6.j",
        "hr.results.f.normal.t6.j",
        "hr.tasks.f.normal.t6.j\r\nPUB x 0",
        "hr.tasks.f .normal.t6.j",
        "hr.tasks.*.normal.t6.j",
        "hr.tasks.f.normal.t6.>",
        "hr.tasks..normal.t6.j",
    ],
)
def test_what_is_no_task_subject_is_refused(subject):
    with pytest.raises(InvalidInput):
        S.parse_task(subject)


def test_every_subject_begins_with_the_prefix():
    other = Subjects("staging-2")
    built = [
        other.task("f", "bulk", 0, "j"),
        other.manifest("j"),
        other.result("call", "f", "j"),
        other.job_event("j", "sealed"),
        other.dead("HR_TASKS"),
        other.api("submit"),
    ]
    assert all(subject.startswith("staging-2.") for subject in built)


@given(st.integers(1, 2**MAX_SHAPE))
def test_a_shape_is_the_smallest_power_of_two_that_holds_the_tokens(tokens):
    shape = shape_of(tokens)
    assert tokens <= 2**shape
    assert shape == 0 or tokens > 2 ** (shape - 1)


@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, 10**9))
def test_every_shape_is_clamped_to_one_that_has_a_consumer(low, high, tokens):
    spec = FunctionSpec(name="f", min_shape=min(low, high), max_shape=max(low, high, 1))
    assert spec.clamp_shape(shape_of(tokens)) in spec.shapes()


def matches(pattern: str, subject: str) -> bool:
    """NATS's own rule: `*` is one token, `>` is the rest (one or more)."""
    wanted, got = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return len(got) > at
        if at >= len(got) or token not in ("*", got[at]):
            return False
    return len(wanted) == len(got)
