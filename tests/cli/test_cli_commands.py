"""Each command against a running mesh: its exit code, its JSON, its words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.cli.main import app
from headrace.contracts.api import JobStatus
from tests.cli.harness import HEADRACE, Up, clean_environment, headrace, write_prompts

STATUS_KEYS = list(JobStatus.__struct_fields__)[:13]
PROMISED_KEYS = {
    *("job", "state", "submitted", "ok", "failed", "dead", "cancelled", "queued", "landing", "running"),
    *("duplicates", "tokens_in", "tokens_out"),
}
COMMANDS = [c.name for c in app.registered_commands]


@pytest.fixture(scope="module")
def ten(echo_mesh, tmp_path_factory):
    """A job of ten items that has ended well."""
    path = write_prompts(tmp_path_factory.mktemp("in") / "ten.jsonl", 10)
    receipt = echo_mesh.json("submit", str(path), "--job", "ten")
    assert receipt == {"job": "ten", "submitted": 10, "refused": 0, "resumed_from": 0}
    assert echo_mesh.json("watch", "ten")["state"] == "completed"
    return path


# --- help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_help(command):
    done = headrace(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: headrace ")
    assert "--dir" in done.stdout


def test_the_help_of_all_names_every_command_and_exit_code():
    done = headrace("--help")
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)
    assert "130  Ctrl-C" in done.stdout
    assert headrace("--version").stdout.startswith("headrace ")


def test_wrong_usage_is_two():
    assert headrace("status").returncode == 2
    assert headrace("no-such-command").returncode == 2
    assert headrace("sql", "select 1", "--max-rows", "0").returncode == 2


def test_an_argument_that_is_no_text_is_refused():
    done = headrace("sql", b"select '\xff'")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the argument ")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_closed_standard_streams_are_no_end(echo_mesh, ten, closed):
    shell = f'exec "$@" {closed}'
    status = ["status", "ten", "--json", "--dir", str(echo_mesh.folder)]
    assert subprocess.run(["sh", "-c", shell, "sh", *HEADRACE, *status], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(echo_mesh, ten):
    for command in ("status", "results"):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*HEADRACE, command, "ten", "--dir", str(echo_mesh.folder)],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr == "error: [Errno 28] No space left on device\n"


# --- finding the mesh -------------------------------------------------------------------------------


def test_the_mesh_is_found_in_all_ways(echo_mesh, ten, tmp_path):
    (tmp_path / ".headrace").symlink_to(echo_mesh.folder)
    ways = [
        headrace("status", "ten", "--json", "--url", echo_mesh.url),
        headrace("status", "ten", "--json", "--dir", str(echo_mesh.folder)),
        headrace("status", "ten", "--json", HEADRACE_NATS_URL=echo_mesh.url),
        headrace("status", "ten", "--json", HEADRACE_DIR=str(echo_mesh.folder)),
        headrace("status", "ten", "--json", cwd=tmp_path),
    ]
    assert [json.loads(done.stdout)["ok"] for done in ways] == [10] * 5


def test_no_mesh_is_one_line_and_for_scripts_one_object(tmp_path):
    done = headrace("status", "j", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no mesh found")
    assert "headrace up" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "no_mesh"


def test_a_mesh_that_was_stopped_is_told_apart(tmp_path):
    (tmp_path / "mesh.json").write_text('{"url": "nats://127.0.0.1:9", "port": 9}')
    done = headrace("jobs", "--dir", str(tmp_path))
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: the mesh in {tmp_path} is not running: start it with `headrace up --dir {tmp_path}`\n"
    )


def test_nobody_at_the_address_is_one_line():
    done = headrace("jobs", "--url", "nats://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no broker answers at nats://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 1


# --- submit -----------------------------------------------------------------------------------------


def test_the_same_submit_again_says_so_and_another_input_is_refused(echo_mesh, ten, tmp_path):
    again = echo_mesh.json("submit", str(ten), "--job", "ten")
    assert again == {"job": "ten", "submitted": 10, "refused": 0, "resumed_from": 10}
    other = echo_mesh.run("submit", str(write_prompts(tmp_path / "other.jsonl", 3)), "--job", "ten", "--json")
    assert other.returncode == 1
    assert json.loads(other.stdout)["error"]["code"] == "job_exists"


@pytest.fixture
def bad_lines(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        '{"prompt": "one"}',
        '{"prompt": "two"}',
        '{"prompt": "thr',
        '{"prompt": "four"}',
        '{"max_tokens": 3}',
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_bad_lines_are_each_one_json_object_and_nothing_is_stored(echo_mesh, bad_lines):
    done = echo_mesh.run("submit", str(bad_lines), "--job", "bad", "--json")
    assert done.returncode == 2
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [set(e) for e in errors] == [{"line", "field", "error"}] * 2
    assert [e["line"] for e in errors] == [3, 5]
    assert echo_mesh.run("status", "bad").returncode == 1


def test_bad_lines_for_people_are_named_on_standard_error(echo_mesh, bad_lines):
    done = echo_mesh.run("submit", str(bad_lines), "--job", "bad")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "line 3" in done.stderr
    assert "line 5" in done.stderr
    assert "error: 2 bad lines, nothing was stored" in done.stderr


def test_skip_bad_takes_the_good_lines_and_reports_the_others(echo_mesh, bad_lines):
    done = echo_mesh.run("submit", str(bad_lines), "--job", "good", "--json", "--skip-bad")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"job": "good", "submitted": 3, "refused": 2, "resumed_from": 0}
    assert [json.loads(line)["line"] for line in done.stderr.splitlines()] == [3, 5]
    assert echo_mesh.json("watch", "good")["ok"] == 3


def test_standard_input_and_a_job_without_a_name(echo_mesh):
    done = echo_mesh.run("submit", "-", "--json", "--progress", stdin='{"prompt": "x"}\n')
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["job"]) == 36


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--job", "a b"), "job 'a b' is not a valid name"),
        (("--lane", "fast"), "lane 'fast' is unknown"),
        (("--function", "nope"), "function 'nope' is not registered"),
        (("--format", "xml"), "format 'xml' is unknown"),
        (("--default", "oops"), "'oops' is not NAME=VALUE"),
        (("--model", "gpt-9"), "runs model echo, not gpt-9"),
    ],
)
def test_what_cannot_be_submitted_is_refused_by_name(echo_mesh, ten, flags, said):
    done = echo_mesh.run("submit", str(ten), *flags)
    assert done.returncode in {1, 2}
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there_is_a_clear_error(echo_mesh, tmp_path):
    done = echo_mesh.run("submit", str(tmp_path / "no.jsonl"))
    assert done.returncode in {1, 2}
    assert done.stderr.startswith("error: ")
    assert "no.jsonl" in done.stderr


def test_wrong_defaults_are_named(echo_mesh, ten):
    done = echo_mesh.run("submit", str(ten), "--default", "max_tokens=-5")
    assert done.returncode == 2
    assert "default max_tokens: expected integer >= 1, got -5" in done.stderr


# --- status, watch, audit ---------------------------------------------------------------------------


def test_status_has_exactly_the_promised_keys_first(echo_mesh, ten):
    found = echo_mesh.json("status", "ten")
    assert set(STATUS_KEYS) == PROMISED_KEYS
    assert list(found)[: len(STATUS_KEYS)] == STATUS_KEYS
    assert (found["submitted"], found["ok"], found["queued"], found["landing"]) == (10, 10, 0, 0)
    assert "completed" in echo_mesh.run("status", "ten").stdout


def test_a_watch_with_a_timeout_tells_an_unknown_job_too(echo_mesh):
    done = echo_mesh.run("watch", "never-heard-of", "--timeout", "0.5", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "unknown_job"


def test_an_unknown_job_is_one_for_every_command(echo_mesh):
    for command in ("status", "audit", "results", "cancel", "watch"):
        done = echo_mesh.run(command, "never-heard-of")
        assert done.returncode == 1, command
        assert done.stderr.startswith("error: "), command


def test_audit_adds_the_proof(echo_mesh, ten):
    found = echo_mesh.json("audit", "ten")
    assert list(found)[: len(STATUS_KEYS)] == STATUS_KEYS
    assert found["balanced"] is True
    assert found["missing"] == []
    assert found["sources"]["rows_landed"] == found["sources"]["manifest_stored"] == 10
    text = echo_mesh.run("audit", "ten").stdout
    assert "balanced" in text
    assert "NOT" not in text


def test_watch_of_a_job_with_failed_items_is_three(echo_mesh, tmp_path):
    path = tmp_path / "fails.jsonl"
    good, bad = {"prompt": "fine"}, {"prompt": "no", "repetition_penalty": 1.5}
    path.write_text("".join(json.dumps(line) + "\n" for line in (good, bad, good)))
    echo_mesh.json("submit", str(path), "--job", "fails")
    done = echo_mesh.run("watch", "fails", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["state"], found["ok"], found["failed"]) == ("completed_with_errors", 2, 1)
    rows = [json.loads(line) for line in echo_mesh.run("results", "fails").stdout.splitlines()]
    assert [r["status"] for r in rows] == ["ok", "failed", "ok"]
    assert rows[1]["error"]["type"]


# --- results, sql, jobs -----------------------------------------------------------------------------


def test_results_in_three_formats_and_in_order(echo_mesh, ten, tmp_path):
    lines = [json.loads(line) for line in echo_mesh.run("results", "ten").stdout.splitlines()]
    assert [line["index"] for line in lines] == list(range(10))
    assert [line["output"] for line in lines] == [f"say {i}" for i in range(10)]
    wanted = {"index", "custom_id", "status", "output", "finish_reason", "usage", "error", "attempt", "model"}
    assert wanted <= set(lines[0])
    out = tmp_path / "out.jsonl"
    done = echo_mesh.run("results", "ten", "--format", "openai", "--out", str(out))
    assert done.returncode == 0
    assert done.stdout == ""
    batch = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["response"]["body"]["choices"][0]["text"] for line in batch] == [
        f"say {i}" for i in range(10)
    ]
    parquet = tmp_path / "out.parquet"
    assert echo_mesh.run("results", "ten", "--format", "parquet", "--out", str(parquet)).returncode == 0
    assert pq.read_table(parquet).column("output").to_pylist() == [f"say {i}" for i in range(10)]


@pytest.mark.parametrize(
    "flags", [("--format", "xml"), ("--format", "parquet"), ("--out", "/no/such/folder/x")]
)
def test_results_that_cannot_be_written_are_refused(echo_mesh, ten, flags):
    done = echo_mesh.run("results", "ten", *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_sql_answers_in_objects_and_says_when_rows_were_cut(echo_mesh, ten):
    query = "SELECT count(*) AS n, sum(prompt_tokens) AS t FROM outcomes WHERE job = 'ten'"
    (row,) = echo_mesh.json("sql", query)
    assert row["n"] == 10
    done = echo_mesh.run("sql", "SELECT * FROM range(50) t(i)", "--json", "--max-rows", "7")
    assert [r["i"] for r in json.loads(done.stdout)] == list(range(7))
    assert "only the first 7 rows" in done.stderr
    assert "count" in echo_mesh.run("sql", "SELECT 1 AS count").stdout


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM outcomes",
        "ATTACH '/tmp/x.db'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT nonsense FROM",
        " ",
    ],
)
def test_sql_that_writes_or_reads_files_is_refused(echo_mesh, statement):
    done = echo_mesh.run("sql", statement, "--json")
    assert done.returncode in {1, 2}
    assert json.loads(done.stdout)["error"]["message"]
    assert done.stderr.startswith("error: ")


def test_a_reader_that_leaves_early_is_no_error(echo_mesh):
    command = [*HEADRACE, "sql", "SELECT * FROM range(9000) t(i)", "--max-rows", "9000", "--json"]
    command += ["--dir", str(echo_mesh.folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(30)


def test_an_unknown_state_is_refused_with_the_known_ones(echo_mesh):
    done = echo_mesh.run("jobs", "--state", "done")
    assert done.returncode == 2
    assert "state 'done' is unknown: use one of open, sealed" in done.stderr


def test_jobs_are_listed_newest_first(echo_mesh, ten):
    found = echo_mesh.json("jobs")
    assert "ten" in [job["job"] for job in found]
    opened = [job["opened_us"] for job in found]
    assert opened == sorted(opened, reverse=True)
    assert [j["state"] for j in echo_mesh.json("jobs", "--state", "completed", "--limit", "1")] == [
        "completed"
    ]
    assert "ten" in echo_mesh.run("jobs").stdout


# --- init, doctor -----------------------------------------------------------------------------------


def test_init_is_idempotent_and_a_dry_run_makes_nothing(echo_mesh):
    assert echo_mesh.json("init") == {"made": [], "dry_run": False}
    assert "as it should be" in echo_mesh.run("init").stdout
    dry = echo_mesh.json("init", "--dry-run", "--function", "planned")
    assert dry == {"made": ["function planned"], "dry_run": True}
    assert echo_mesh.json("init", "--function", "planned")["made"] == ["function planned"]
    assert echo_mesh.json("init", "--function", "planned")["made"] == []


def test_init_refuses_what_differs(echo_mesh):
    done = echo_mesh.run("init", "--function", "generate", "--max-model-len", "77", "--json")
    assert done.returncode == 1
    assert "max_model_len" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "drift"


def test_doctor_of_a_sound_mesh_fails_nothing(echo_mesh):
    found = echo_mesh.json("doctor")
    assert all(set(f) == {"check", "state", "found", "mend"} for f in found)
    states = {f["check"]: f["state"] for f in found}
    assert "fail" not in states.values()
    for check in (
        "server version",
        "jetstream",
        "consumers",
        "clock",
        "completion",
        "gateway",
        "workers of generate",
    ):
        assert states[check] == "ok", found
    assert states["durability"] == "warn"  # this mesh is relaxed
    assert "relaxed" in echo_mesh.run("doctor").stdout


def test_doctor_of_no_broker_fails(tmp_path):
    done = headrace("doctor", "--url", "nats://127.0.0.1:9", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)[0]["state"] == "fail"


# --- what takes a mesh of its own ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_mesh(tmp_path_factory):
    """A mesh whose items take a second each, four at once."""
    up = Up(
        tmp_path_factory.mktemp("slow") / "D",
        "--slots",
        "4",
        "--engine-option",
        "delay_ms=1000",
        "--grace",
        "5",
    )
    yield up
    up.kill()


def test_watch_outlives_a_restart_of_completion_and_shows_progress(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 12)), "--job", "watched")
    watch = subprocess.Popen(
        [*HEADRACE, "watch", "watched", "--json", "--dir", str(slow_mesh.folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    first = watch.stderr.readline()
    assert "watched" in first
    slow_mesh.kill_service("completion")
    out, err = watch.communicate(timeout=60)
    assert watch.returncode == 0, err
    assert json.loads(out)["ok"] == 12
    assert err.count("trying again") <= 1
    assert "Traceback" not in err


def test_watch_gives_up_after_its_timeout_and_the_job_goes_on(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 8)), "--job", "late")
    done = slow_mesh.run("watch", "late", "--timeout", "0.5", "--json")
    assert done.returncode == 5
    assert "had not ended after 0.5 s" in done.stderr
    assert json.loads(done.stdout)["submitted"] == 8
    assert slow_mesh.json("watch", "late")["ok"] == 8


def test_the_timeout_of_a_watch_holds_while_completion_hangs(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 2)), "--job", "hung")
    pid = slow_mesh.pid("completion")
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert slow_mesh.run("watch", "hung", "--timeout", "1").returncode == 5
        assert time.monotonic() - began < 8  # a request alone waits for ten
    finally:
        os.kill(pid, signal.SIGCONT)
    assert slow_mesh.json("watch", "hung")["ok"] == 2


def test_cancel_keeps_what_is_finished_and_watch_says_four(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 40)), "--job", "ended")
    found = slow_mesh.json("cancel", "ended")
    assert found["state"] == "cancelled"
    assert found["kept"] + found["cancelled"] == 40
    assert found["cancelled"] > 0
    assert slow_mesh.run("watch", "ended").returncode == 4
    assert slow_mesh.json("audit", "ended")["balanced"]
    again = slow_mesh.run("cancel", "ended")
    assert again.returncode == 0
    assert "ended" in again.stdout
    resubmit = slow_mesh.run("submit", str(tmp_path / "p.jsonl"), "--job", "ended", "--json")
    assert resubmit.returncode == 1
    assert json.loads(resubmit.stdout)["error"]["code"] == "job_cancelled"


def test_ctrl_c_of_a_watch_is_quiet(slow_mesh, tmp_path):
    slow_mesh.json("submit", str(write_prompts(tmp_path / "p.jsonl", 40)), "--job", "left")
    command = [*HEADRACE, "watch", "left", "--dir", str(slow_mesh.folder)]
    watch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    watch.stderr.readline()
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=30)
    assert watch.returncode == 130
    assert "Traceback" not in err
    slow_mesh.json("cancel", "left")


@pytest.mark.slow
def test_a_submit_to_a_broker_that_is_gone_names_what_is_stored_and_how_to_go_on(tmp_path):
    up = Up(tmp_path / "D")
    try:
        path = write_prompts(tmp_path / "p.jsonl", 30_000)
        command = [*HEADRACE, "submit", str(path), "--job", "cut", "--progress", "--patience", "1"]
        submit = subprocess.Popen(
            [*command, "--dir", str(up.folder)], stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        lines = []
        for line in submit.stderr:
            lines.append(line)
            if line.startswith("storing"):
                break
        up.process.send_signal(signal.SIGSTOP)  # so that the broker is not started again
        os.kill(up.pid("nats-server"), signal.SIGKILL)
        lines += submit.stderr.readlines()
        submit.stderr.close()
        assert submit.wait(60) == 1, lines
        text = "".join(lines)
        assert "error: " in text
        assert "headrace submit" in text
        assert "--job cut" in text
        up.process.send_signal(signal.SIGCONT)
        up.err.wait_for("nats-server is back")
        again = up.json("submit", str(path), "--job", "cut")
        known = int(
            next(line for line in lines if "are known to be stored" in line).split()[0].replace(",", "")
        )
        assert again["submitted"] == 30_000
        assert known <= again["resumed_from"] < 30_000
        assert up.json("watch", "cut", timeout=100)["ok"] == 30_000
    finally:
        up.kill()


def test_ctrl_c_of_a_submit_says_what_is_stored_and_how_to_go_on(echo_mesh, tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 30_000)
    command = [
        *HEADRACE,
        "submit",
        str(path),
        "--job",
        "interrupted",
        "--progress",
        "--dir",
        str(echo_mesh.folder),
    ]
    submit = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert submit.stderr.readline()
    submit.send_signal(signal.SIGINT)
    _, err = submit.communicate(timeout=60)
    assert submit.returncode == 130
    assert f"headrace submit {path} --job interrupted" in err
    assert "Traceback" not in err
    assert echo_mesh.json("submit", str(path), "--job", "interrupted")["submitted"] == 30_000
    assert echo_mesh.json("watch", "interrupted", timeout=100)["ok"] == 30_000


# --- demo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["echo", "sim"])
def test_the_demo_without_a_model(tmp_path, engine):
    done = headrace("demo", "--engine", engine, "--json", "--dir", str(tmp_path / "D"), timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] == found["submitted"] >= 120
    assert found["balanced"] is True
    assert found["tokens_per_s"] > 0
    assert len(found["samples"]) == 3
    assert json.loads((tmp_path / "D" / "mesh.json").read_text())["pids"] == {}


def test_the_demo_ends_with_tables_and_leaves_nothing_behind(tmp_path):
    done = headrace("demo", "--engine", "echo", cwd=tmp_path, TMPDIR=str(tmp_path), timeout=110)
    assert done.returncode == 0, done.stderr
    for part in ("The account of demo-", "tokens/s", "Three of the answers"):
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_demo_without_its_engine_names_the_extra(tmp_path):
    code = (
        "import sys, importlib.util as u; f = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n == 'xllamacpp' else f(n, *a);"
        "import headrace.cli.main as m; sys.argv = ['headrace', 'demo']; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'headrace[local]'" in done.stderr
