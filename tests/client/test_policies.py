"""Deadlines and failure limits as people write them, and as they are stored with a job and its items."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from headrace.client import AsyncClient
from headrace.client.jobs import last_event
from headrace.client.policies import deadline_us, share, time_text
from headrace.client.submit import SubmitOptions, submit
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import JobOpened
from headrace.mesh.connection import Mesh
from tests.client.harness import manifest, plain, stored_tasks

NOON = 1_796_126_400_000_000
NOW = 1_000_000_000


@pytest.mark.parametrize(
    ("given", "at"),
    [
        ("90s", NOW + 90_000_000),
        ("2h", NOW + 7_200_000_000),
        ("1h30m", NOW + 5_400_000_000),
        ("1.5d", NOW + 129_600_000_000),
        (" 2m ", NOW + 120_000_000),
        (2, NOW + 2_000_000),
        (0.5, NOW + 500_000),
        (timedelta(minutes=1), NOW + 60_000_000),
        ("2026-12-01T12:00:00Z", NOON),
        ("2026-12-01T12:00:00", NOON),
        ("2026-12-01 14:00+02:00", NOON),
        ("2026-12-01", NOON - 43_200_000_000),
        (datetime(2026, 12, 1, 12, tzinfo=UTC), NOON),
        (datetime(2026, 12, 1, 12), NOON),  # noqa: DTZ001  (as text: UTC without an offset)
        (datetime(2026, 12, 1, 13, tzinfo=timezone(timedelta(hours=1))), NOON),
    ],
)
def test_a_time_or_a_duration_from_now(given: Any, at: int) -> None:
    assert deadline_us(given, now_us=NOW) == at


def test_it_comes_back_as_text() -> None:
    assert time_text(NOON) == "2026-12-01T12:00:00Z"
    assert deadline_us(time_text(NOON)) == NOON


@pytest.mark.parametrize(
    "given",
    [
        "",
        "2",
        "h",
        "2 hours",
        "-2h",
        "2h!",
        "2026-13-01",
        "1969-12-31",
        "soon",
        float("nan"),
        float("inf"),
        1e300,
        -1e9,
    ],
)
def test_what_is_no_time_is_refused_with_the_forms(given: Any) -> None:
    with pytest.raises(InvalidInput, match="is no time: write a duration") as error:
        deadline_us(given, now_us=NOW)
    assert error.value.field == "deadline"


@pytest.mark.parametrize(
    ("given", "value"), [("5%", 0.05), ("0.05", 0.05), (0.05, 0.05), ("0", 0), ("100 %", 1), (1, 1)]
)
def test_a_share(given: Any, value: float) -> None:
    assert share(given) == value


@pytest.mark.parametrize("given", ["", "%", "5", "101%", "-1%", "five", float("nan"), 2])
def test_what_is_no_share_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInput, match="5%") as error:
        share(given)
    assert error.value.field == "max_failed"


async def opened(mesh: Mesh, job: str = "j") -> JobOpened:
    event = await last_event(mesh, job, "opened")
    assert isinstance(event, JobOpened)
    return event


@pytest.mark.anyio
async def test_the_job_and_each_item_have_the_deadline(ready: Mesh) -> None:
    options = SubmitOptions(deadline=datetime(2126, 1, 1, tzinfo=UTC), max_failed="5%")
    await submit(ready, plain(3), job="j", options=options)
    event = await opened(ready)
    assert (event.deadline_us, event.max_failed) == (4_922_899_200_000_000, 0.05)
    assert [t.deadline_us for t in await stored_tasks(ready)] == [event.deadline_us] * 3


@pytest.mark.anyio
async def test_a_client_takes_both(ready: Mesh) -> None:
    async with AsyncClient(mesh=ready) as client:
        await client.submit(plain(1), job="j", deadline="1h", max_failed=0.1)
    event = await opened(ready)
    assert event.max_failed == 0.1
    assert event.deadline_us is not None
    assert 3_500 < event.deadline_us / 1e6 - event.at_us / 1e6 <= 3_600


@pytest.mark.anyio
async def test_a_resumed_submit_keeps_what_the_job_was_opened_with(ready: Mesh) -> None:
    """`--deadline 2h` counts from the first run, for the items of the second as well."""
    lines = plain(3)
    await submit(ready, lines, job="j", options=SubmitOptions(deadline="1h", max_failed=0.1))
    first = await opened(ready)
    receipt = await submit(ready, lines, job="j", options=SubmitOptions(deadline="3h", max_failed=0.2))
    assert await opened(ready) == first
    notes = " ".join(receipt.notes)
    assert f"keeps the deadline that it was opened with, {time_text(first.deadline_us or 0)}" in notes
    assert "keeps the failure limit that it was opened with: 0.1" in notes
    assert (await submit(ready, lines, job="j", options=SubmitOptions())).submitted == 3
    again = await submit(ready, lines, job="k")
    assert again.notes == []
    later = await submit(ready, lines, job="k", options=SubmitOptions(deadline="3h"))
    assert "without a deadline" in " ".join(later.notes)


@pytest.mark.anyio
async def test_a_deadline_that_has_passed_stores_nothing(ready: Mesh) -> None:
    with pytest.raises(InvalidInput, match="has passed: nothing was stored"):
        await submit(ready, plain(1), job="j", options=SubmitOptions(deadline="2020-01-01"))
    assert await last_event(ready, "j", "opened") is None
    # Of a job that exists it is no news.
    await submit(ready, plain(1), job="j")
    await submit(ready, plain(1), job="j", options=SubmitOptions(deadline="2020-01-01"))


@pytest.mark.anyio
async def test_a_wrong_policy_is_refused_before_anything_is_read(ready: Mesh) -> None:
    for fields in ({"deadline": "tomorrow"}, {"max_failed": "7"}):
        with pytest.raises(InvalidInput):
            await submit(ready, plain(1), job="j", options=SubmitOptions(**fields))
    assert await last_event(ready, "j", "opened") is None


@pytest.mark.anyio
async def test_the_manifest_counts_by_shape_over_batches(ready: Mesh) -> None:
    lines = [{"prompt_token_ids": [1] * (10 if i % 3 else 100), "max_tokens": 4} for i in range(2_100)]
    await submit(ready, lines, job="j")
    found = await manifest(ready, "j")
    assert (found.stored, found.shapes) == (2_100, {"t6": 1_400, "t7": 700})
