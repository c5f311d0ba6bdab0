"""`headrace audit`, once and through a run, and jobs that end early, as the command shows them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from headrace.cli.audit_view import AuditView, account_table, line, ranges_text
from headrace.contracts.api import JobAudit, ShapeAccount, Sources, TenantAudit
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.cli.harness import HEADRACE, Reader, Up, clean_environment, headrace, write_prompts
from tests.completion.world import Producer, serving, until

TERMS = ("ok", "failed", "dead", "cancelled", "queued", "landing")


def law(account: dict) -> bool:
    return account["submitted"] == sum(account[name] for name in TERMS)


class Watching:
    """`headrace audit --watch` that runs."""

    def __init__(self, *arguments: str):
        self.process = subprocess.Popen(
            [*HEADRACE, "audit", *arguments, "--watch"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(),
        )  # fmt: skip
        self.out, self.err = Reader(self.process.stdout), Reader(self.process.stderr)

    def wait(self, timeout: float = 90) -> int:
        code = self.process.wait(timeout)
        self.out.join(10)
        self.err.join(10)
        return code

    def samples(self) -> list[dict]:
        return [json.loads(text) for text in self.out.lines]


@pytest.fixture(scope="module")
def slow_mesh(tmp_path_factory):
    """A mesh whose items take half a second each, four at once."""
    folder = tmp_path_factory.mktemp("slow") / "D"
    up = Up(folder, "--slots", "4", "--engine-option", "delay_ms=500", "--grace", "5")
    yield up
    up.kill()


# --- once -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def one(echo_mesh, tmp_path_factory):
    path = write_prompts(tmp_path_factory.mktemp("in") / "one.jsonl", 5)
    echo_mesh.json("submit", str(path), "--job", "audited")
    assert echo_mesh.json("watch", "audited")["state"] == "completed"
    return echo_mesh


def test_one_job_with_its_shapes(one):
    found = one.json("audit", "audited")
    assert (found["balanced"], found["missing"], found["doubled"]) == (True, [], [])
    (shape,) = found["shapes"]
    assert (shape["shape"], shape["submitted"], shape["ok"]) == ("t6", 5, 5)
    text = one.run("audit", "audited").stdout
    assert "t6" in text
    assert "doubled" in text


def test_all_jobs_together(one):
    found = one.json("audit")
    assert found["jobs"] >= 1
    assert found["balanced"] is True
    assert found["unbalanced"] == []
    assert law(found)
    assert all(law(shape) for shape in found["shapes"])
    text = one.run("audit").stdout
    assert "jobs that do not balance" in text
    assert "none" in text


def test_an_interval_without_a_watch_is_wrong_usage(one):
    done = one.run("audit", "audited", "--interval", "2")
    assert done.returncode == 2
    assert "--watch" in done.stderr


def test_a_watch_of_what_has_ended_is_one_sample(one):
    for job in (["audited"], []):
        done = one.run("audit", *job, "--watch", "--json")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr.splitlines() == ["1 samples: 1 balanced, 0 unbalanced"]


def test_a_watch_of_an_unknown_job_is_told_after_seconds(one):
    done = one.run("audit", "never-heard-of", "--watch", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "unknown_job"
    assert "0 samples" in done.stderr


# --- through a run ----------------------------------------------------------------------------------
def test_a_watch_samples_through_kills_of_completion_and_broker_until_the_end(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 60)), "--job", "long")
    watching = Watching("long", "--json", "--interval", "0.2", "--dir", str(slow_mesh.folder))
    watching.out.wait_for('"job":"long"')
    for service in ("completion", "nats-server"):
        seen = len(watching.out.lines)
        slow_mesh.kill_service(service)
        watching.out.wait_for('"job":"long"', after=seen + 1)
    assert watching.wait() == 0, watching.err.lines
    samples = watching.samples()
    assert all(s["balanced"] for s in samples)
    assert all(law(s) for s in samples)
    assert all(law(shape) for s in samples for shape in s["shapes"])
    assert [s["ok"] for s in samples] == sorted(s["ok"] for s in samples)
    assert (samples[-1]["state"], samples[-1]["ok"], samples[-1]["missing"]) == ("completed", 60, [])
    assert [s["state"] for s in samples].count("completed") == 1
    assert any("trying again" in text for text in watching.err.lines)
    assert watching.err.lines[-1] == f"{len(samples)} samples: {len(samples)} balanced, 0 unbalanced"


def test_without_json_there_is_a_line_for_each_sample_and_tables_at_the_end(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 40)), "--job", "lines")
    watching = Watching("lines", "--interval", "0.2", "--dir", str(slow_mesh.folder))
    assert watching.wait() == 0
    lines = [text for text in watching.err.lines if text.startswith("lines ")]
    assert len(lines) >= 2
    assert lines[-1].startswith("lines completed: submitted 40 = ok 40 + failed 0 + ")
    assert all(text.endswith(": balanced") for text in lines)
    assert "t6" in "\n".join(watching.out.lines)


def test_all_jobs_are_watched_until_none_is_open(slow_mesh, tmp_path):
    for job in ("one", "two"):
        slow_mesh.json("submit", str(write_prompts(tmp_path / f"{job}.jsonl", 40)), "--job", job)
    watching = Watching("--json", "--interval", "0.2", "--dir", str(slow_mesh.folder))
    assert watching.wait() == 0, watching.err.lines
    samples = watching.samples()
    assert samples[0]["open_jobs"] >= 1
    assert samples[-1]["open_jobs"] == samples[-1]["queued"] == 0
    assert all(s["balanced"] and law(s) for s in samples)


def test_ctrl_c_ends_a_watch_and_the_job_goes_on(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 16)), "--job", "on")
    watching = Watching("on", "--json", "--interval", "0.1", "--dir", str(slow_mesh.folder))
    watching.out.wait_for('"job":"on"')
    watching.process.send_signal(signal.SIGINT)
    assert watching.wait() == 130
    assert "balanced" in watching.err.lines[-1]
    assert "Traceback" not in "\n".join(watching.err.lines)
    assert slow_mesh.json("watch", "on")["ok"] == 16


@pytest.mark.anyio
async def test_one_sample_that_does_not_balance_makes_it_one(mesh: Mesh, settings: Settings) -> None:
    """The lost task is found while others still wait, so the run as a whole fails though the rest goes well."""
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6,))
        await job.whole(10)
        await job.take_away([3])
        watching = Watching("j", "--json", "--interval", "0.1", "--url", settings.url)
        await asyncio.to_thread(watching.out.wait_for, '"balanced":false')
        await job.work(i for i in range(10) if i != 3)
        await until(job.results_empty)
        (gone,) = [s["missing"] for s in [(await _sample(settings))]]
        assert gone == [[3, 3]]
        await job.work([3], remove=False)
        assert await asyncio.to_thread(watching.wait) == 1
        samples = watching.samples()
        assert samples[-1]["balanced"] is True
        assert " unbalanced" in watching.err.lines[-1]
        assert not watching.err.lines[-1].endswith(" 0 unbalanced")


async def _sample(settings: Settings) -> dict:
    done = await asyncio.to_thread(headrace, "audit", "j", "--json", "--url", settings.url)
    assert done.returncode == 1
    return json.loads(done.stdout)


# --- jobs that end early ----------------------------------------------------------------------------
def test_a_deadline_ends_a_job_and_every_command_says_so(slow_mesh, tmp_path):
    at = datetime.now(UTC) + timedelta(seconds=3)
    path = str(write_prompts(tmp_path / "p.jsonl", 200))
    slow_mesh.json("submit", path, "--job", "timed", "--deadline", at.isoformat())
    done = slow_mesh.run("watch", "timed", "--json")
    assert done.returncode == 4, done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["cause"], found["submitted"]) == ("cancelled", "deadline", 200)
    assert found["reason"].startswith("the deadline passed: ")
    assert abs(found["deadline_us"] - at.timestamp() * 1e6) < 2
    # What had not begun was failed by the worker or filled in by the cancellation, whoever was first.
    assert found["failed"] + found["cancelled"] > 100
    assert law(found)
    text = slow_mesh.run("status", "timed").stdout
    assert "deadline" in text
    assert "the deadline passed" in text
    results = slow_mesh.run("results", "timed")
    assert "was ended before all its items ran: the deadline passed" in results.stderr
    rows = [json.loads(row) for row in results.stdout.splitlines()]
    assert [r["index"] for r in rows] == list(range(200))
    assert {r["error"]["type"] for r in rows if r["status"] != "ok"} == {"deadline"}
    audit = slow_mesh.json("audit", "timed")
    assert audit["balanced"]
    assert all(law(shape) for shape in audit["shapes"])
    # The same command again: the name is taken by a job that has ended.
    again = slow_mesh.run("submit", path, "--job", "timed", "--deadline", at.isoformat())
    assert again.returncode == 1
    assert "was cancelled" in again.stderr


def test_too_many_failures_end_a_job(slow_mesh, tmp_path):
    path = tmp_path / "bad.jsonl"
    bad = json.dumps({"prompt": "no", "repetition_penalty": 1.5})
    good = [json.dumps({"prompt": f"fine {i}"}) for i in range(100)]
    path.write_text("\n".join([*[bad] * 40, *good]) + "\n")
    slow_mesh.json("submit", str(path), "--job", "failing", "--max-failed", "10%")
    done = slow_mesh.run("watch", "failing", "--json")
    assert done.returncode == 4, done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["cause"]) == ("cancelled", "failures")
    assert "landed items failed (limit 10 %)" in found["reason"]
    assert found["cancelled"] > 0
    assert law(found)


@pytest.mark.parametrize(
    "flags", [("--deadline", "tomorrow"), ("--max-failed", "7"), ("--deadline", "2020-01-01")]
)
def test_a_policy_that_is_wrong_is_two(one, tmp_path, flags):
    done = one.run("submit", str(write_prompts(tmp_path / "p.jsonl", 1)), "--job", "wrong", *flags)
    assert done.returncode == 2, done.stderr
    assert one.run("status", "wrong").returncode == 1


# --- what is drawn ----------------------------------------------------------------------------------
AUDIT = JobAudit(
    job="j", state="sealed", submitted=5_000, ok=3, queued=4_997, balanced=False, missing=[(1, 1)],
    sources=Sources(manifest_stored=5, manifest_closed="", tasks_in_broker=2, results_in_broker=0, rows_landed=3,
                    distinct_indices=3),
    shapes=[ShapeAccount(shape="t7", submitted=5_000, ok=3, queued=4_997)],
)  # fmt: skip


def test_the_live_table_has_shapes_totals_and_the_verdict(capsys):
    Console(width=200).print(account_table(AUDIT))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "j sealed  NOT balanced"
    t7, total = (
        next(row for row in shown if row.startswith(name)).replace("│", "").split() for name in ("t7", "all")
    )
    assert t7[1:] == total[1:] == ["5,000", "3", "0", "0", "0", "4,997", "0"]
    with AuditView(live=True) as view:  # a terminal that is none draws nothing, and is left in order
        view.show(AUDIT)
        view.note("broker away")
    assert "broker away" in capsys.readouterr().err


def test_a_quiet_view_tells_troubles_only(capsys):
    with AuditView(quiet=True, live=True) as view:
        view.show(AUDIT)
        view.note("broker away")
    assert capsys.readouterr().err == "broker away\n"


def test_lines_and_ranges():
    assert line(AUDIT) == (
        "j sealed: submitted 5,000 = ok 3 + failed 0 + dead 0 + cancelled 0 + queued 4,997 + landing 0: NOT balanced"
    )
    tenant = TenantAudit(
        jobs=2_000, open_jobs=1, submitted=0, ok=0, failed=0, dead=0, cancelled=0, queued=0, landing=0, duplicates=0,
        balanced=True, unbalanced=[], shapes=[],
    )  # fmt: skip
    assert line(tenant).startswith("2,000 jobs, 1 not ended: submitted 0 = ")
    assert ranges_text([]) == "none"
    assert ranges_text([(3, 5), (9, 9)]) == "3-5, 9"
    assert ranges_text([(i, i) for i in range(0, 60, 2)]).endswith(", 38, and 10 more ranges")
