"""`headrace run`, `headrace functions` and `headrace worker --functions`, as people type them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.harness import HEADRACE, Reader, Up, clean_environment, headrace

pytestmark = pytest.mark.timeout(150)

MODULE = '''
import os
import time
from pathlib import Path

from msgspec import Struct

from headrace.forge import RowError, function


class Row(Struct):
    text: str
    seconds: float = 0.0


class Answer(Struct):
    upper: str
    length: int


@function(version="2")
def probe(rows: list[Row]) -> list[Answer | RowError]:
    """Upper case and length."""
    found = []
    for row in rows:
        if row.text == "raise":
            raise ValueError("this row raises")
        time.sleep(row.seconds)
        found.append(Answer(row.text.upper(), len(row.text)))
    return found


@function
def plain(rows):
    """Any JSON."""
    return [{"got": row} for row in rows]
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of functions and a file of fifty rows, one of which fails."""
    path = tmp_path_factory.mktemp("run")
    (path / "pkg").mkdir()
    (path / "pkg" / "mod.py").write_text(MODULE)
    (path / "later.py").write_text(MODULE.replace("probe", "later"))
    rows = [{"text": "raise" if i == 17 else f"row {i}", "custom_id": f"c{i}"} for i in range(50)]
    (path / "FILE").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def mesh(place: Path) -> Iterator[Up]:
    """A mesh that serves the module."""
    (place / "D").mkdir()
    (place / "D" / "headrace.toml").write_text("ack_wait_s = 6\n")  # a killed worker's rows come back soon
    before = Path.cwd()
    os.chdir(place)  # `headrace up` looks for modules where it is started
    try:
        up = Up(place / "D", "--functions", "pkg.mod")
    finally:
        os.chdir(before)
    yield up
    up.kill()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("batching", ["rows:64", "rows:7", "tokens:8192", "tokens:30"])
def test_fifty_rows_here_of_which_one_fails(place: Path, tmp_path: Path, batching: str) -> None:
    out = tmp_path / "out.jsonl"
    done = headrace(
        "run", "pkg.mod:probe", "FILE", "--batching", batching, "--out", str(out), "--json", cwd=place
    )
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert summary.pop("seconds") >= 0
    assert summary.pop("batches") >= 1
    assert summary == {
        "function": "probe", "batching": batching, "job": None, "rows": 50, "ok": 49, "failed": 1, "refused": 0,
        "out": str(out),
    }  # fmt: skip
    found = lines(out)
    assert [row["index"] for row in found] == list(range(50))
    assert [row["custom_id"] for row in found] == [f"c{i}" for i in range(50)]
    assert [row["index"] for row in found if row["status"] != "ok"] == [17]
    assert found[17]["error"] == {"type": "raised", "message": "ValueError: this row raises"}
    assert found[0]["output"] == {"upper": "ROW 0", "length": 5}
    assert list(tmp_path.iterdir()) == [out]


def test_submit_gives_the_same_results_word_for_word(place: Path, mesh: Up, tmp_path: Path) -> None:
    done = headrace(
        "run",
        "pkg.mod:probe",
        "FILE",
        "--batching",
        "submit",
        "--job",
        "J",
        "--dir",
        "D",
        "--json",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "function": "probe", "batching": "submit", "job": "J", "submitted": 50, "refused": 0, "resumed_from": 0,
    }  # fmt: skip
    assert mesh.run("watch", "J").returncode == 3
    assert mesh.run("results", "J", "--out", str(tmp_path / "landed")).returncode == 0
    here = headrace("run", "pkg.mod:probe", "FILE", "--out", str(tmp_path / "here"), cwd=place)
    assert here.returncode == 3
    assert lines(tmp_path / "here") == lines(tmp_path / "landed")
    again = headrace(
        "run", "pkg.mod:probe", "FILE", "--batching", "submit", "--job", "J", "--dir", "D", cwd=place
    )
    assert again.returncode == 0
    assert "50 of them by an earlier run" in again.stdout
    assert mesh.run("audit", "J").returncode == 0


def test_a_setting_switches_the_mode(place: Path, mesh: Up) -> None:
    given = {"HEADRACE_FORGE_BATCHING": "submit"}
    done = headrace(
        "run", "pkg.mod:plain", "FILE", "--job", "env", "--dir", "D", "--json", cwd=place, **given
    )
    assert (done.returncode, json.loads(done.stdout)["submitted"]) == (0, 50)
    flag = headrace("run", "pkg.mod:plain", "FILE", "--batching", "rows:9", "--json", cwd=place, **given)
    assert json.loads(flag.stdout.splitlines()[-1])["batches"] == 6
    assert mesh.run("watch", "env").returncode == 0


def test_rows_go_to_standard_output_and_the_summary_is_last(place: Path) -> None:
    done = headrace("run", "pkg.mod:plain", "-", "--json", cwd=place, stdin='5\n"x"\n\n{"a": null}\n')
    *rows, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["output"] for row in rows] == [{"got": 5}, {"got": "x"}, {"got": {"a": None}}]
    assert (summary["ok"], done.returncode) == (3, 0)
    quiet = headrace("run", "pkg.mod:plain", "-", cwd=place, stdin="5\n")
    assert len(quiet.stdout.splitlines()) == 1
    assert "1 of 1 rows ok, 0 failed" in quiet.stderr


def test_tables_and_packed_files_are_rows_too(place: Path, tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    (tmp_path / "t.csv").write_text("text,custom_id\nhello,a\nbye,b\n")
    (tmp_path / "t.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "hello", "custom_id": "a"}\n{"text": "bye", "custom_id": "b"}\n')
    )
    parquet.write_table(
        Table.from_pylist([{"text": "hello", "custom_id": "a"}, {"text": "bye", "custom_id": "b"}]),
        tmp_path / "t.parquet",
    )
    found = [
        headrace("run", "pkg.mod:probe", str(tmp_path / name), cwd=place)
        for name in ("t.csv", "t.jsonl.gz", "t.parquet")
    ]
    assert [done.returncode for done in found] == [0, 0, 0], [done.stderr for done in found]
    assert len({done.stdout for done in found}) == 1
    assert [json.loads(x)["custom_id"] for x in found[0].stdout.splitlines()] == ["a", "b"]


def test_bad_lines_are_named_and_nothing_runs(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = '{"text": "a"}\n{bad\n{"text": "b", "custom_id": "x"}\n{"text": "c", "custom_id": "x"}\n'
    done = headrace("run", "pkg.mod:probe", "-", "--out", str(out), cwd=place, stdin=text)
    assert done.returncode == 2
    assert "line 2: not JSON" in done.stderr
    assert "line 4, field custom_id: the custom_id was used before, on line 3" in done.stderr
    assert "2 bad lines, nothing was run" in done.stderr
    assert not out.exists()
    some = headrace(
        "run", "pkg.mod:probe", "-", "--out", str(out), "--skip-bad", "--json", cwd=place, stdin=text
    )
    assert (some.returncode, json.loads(some.stdout)["refused"]) == (0, 2)
    assert [(row["index"], row["output"]["upper"]) for row in lines(out)] == [(0, "A"), (1, "B")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nope:f", "FILE"), 1, "there is no module 'nope'"),
        (("pkg.mod:nope", "FILE"), 1, "pkg.mod has the functions plain, probe"),
        (("pkg.mod", "FILE"), 2, "write pkg.mod:function"),
        (("pkg.mod:probe", "missing"), 1, "there is no file missing"),
        (("pkg.mod:probe", "FILE", "--batching", "rows:0"), 2, "use rows:N"),
        (("pkg.mod:probe", "FILE", "--size", "words"), 2, "forge.size"),
        (("pkg.mod:probe", "FILE", "--batching", "submit", "--out", "x", "--job", "J"), 2, "results J --out x"),
        (("pkg.mod:probe", "FILE", "--out", "no/such/folder/x"), 2, "there is no folder no/such/folder"),
        (("pkg.mod:probe", "FILE", "--batching", "submit", "--dir", "nowhere"), 1, "no mesh found in nowhere"),
        (("pkg.mod:probe", "FILE", "--job", "a b"), 2, "job 'a b' is not a valid name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(place: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = headrace("run", *arguments, cwd=place)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_functions_are_listed(place: Path, mesh: Up) -> None:
    listed = {f["name"]: f for f in mesh.json("functions")["functions"]}
    assert set(listed) >= {"generate", "probe", "plain"}
    assert listed["probe"] == {
        "name": "probe", "version": "2", "engine": "python", "model": "pkg.mod:probe@2", "takes": "rows",
        "max_model_len": 0, "lanes": ["urgent", "normal", "bulk"], "shapes": [0],
    }  # fmt: skip
    declared = json.loads(headrace("functions", "pkg.mod", "--json", cwd=place).stdout)["functions"]
    assert [(f["name"], f["rows"], f["answers"], f["summary"]) for f in declared] == [
        ("plain", "any JSON", "any JSON", "Any JSON."),
        ("probe", "Row", "Answer", "Upper case and length."),
    ]


@pytest.mark.slow
def test_a_producer_needs_no_worker_and_a_killed_worker_loses_nothing(
    place: Path, mesh: Up, tmp_path: Path
) -> None:
    """Rows are stored first; then a worker begins, is killed in the middle of them, and another one goes on."""
    rows = tmp_path / "rows"
    rows.write_text("".join(json.dumps({"text": f"r{i}", "seconds": 0.05}) + "\n" for i in range(60)))
    done = headrace(
        "run",
        "later:later",
        str(rows),
        "--batching",
        "submit",
        "--job",
        "K",
        "--dir",
        "D",
        "--json",
        cwd=place,
    )
    assert json.loads(done.stdout)["submitted"] == 60
    command = [*HEADRACE, "worker", "--functions", "later:later", "--batching", "rows:5", "--dir", "D"]
    command += ["--url", mesh.url, "--durability", "relaxed"]
    for kill in (True, False):
        worker = subprocess.Popen(
            command, cwd=place, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        try:
            Reader(worker.stderr).wait_for('"ready"')
            children = psutil.Process(worker.pid).children(recursive=True)
            if kill:
                deadline = time.monotonic() + 60
                while mesh.json("status", "K")["ok"] < 10:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                worker.kill()
                worker.wait(30)
                _, alive = psutil.wait_procs(children, timeout=20)
                assert not alive  # the function's process goes with its worker
                continue
            assert mesh.run("watch", "K", timeout=120).returncode == 0
        finally:
            if worker.poll() is None:
                worker.terminate()
            worker.wait(60)
    assert worker.returncode == 0
    audit = mesh.json("audit", "K")
    assert (audit["ok"], audit["submitted"], audit["balanced"], audit["doubled"]) == (60, 60, True, [])


def test_an_interrupted_run_leaves_neither_file_nor_process(place: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("".join(json.dumps({"text": f"r{i}", "seconds": 0.2}) + "\n" for i in range(500)))
    out = tmp_path / "out"
    command = [
        *HEADRACE,
        "run",
        "pkg.mod:probe",
        str(rows),
        "--batching",
        "rows:2",
        "--out",
        str(out),
        "--progress",
    ]
    run = subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True, env=clean_environment())
    Reader(run.stderr).wait_for("running:")
    children = psutil.Process(run.pid).children(recursive=True)
    assert children
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert list(tmp_path.iterdir()) == [rows]


def test_built_in_functions_run_here(place: Path, tmp_path: Path) -> None:
    prompts = '{"prompt": "hello", "max_tokens": 3}\n{"prompt": ""}\n'
    done = headrace("run", "generate", "-", "--engine", "echo", "--skip-bad", cwd=place, stdin=prompts)
    assert (done.returncode, json.loads(done.stdout)["output"]) == (0, "hello")
    question = json.dumps({"text": "fine", "labels": ["good", "bad"]}) + "\n"
    refused = headrace("run", "classify", "-", "--engine", "echo", cwd=place, stdin=question)
    assert refused.returncode == 3
    assert json.loads(refused.stdout)["error"]["type"] == "unsupported_parameter"


@pytest.mark.llamacpp
def test_classify_chooses_one_of_the_labels(place: Path) -> None:
    text = "".join(
        json.dumps({"text": t, "labels": ["sports", "cooking"]}) + "\n" for t in ("a goal", "a soup")
    )
    done = headrace(
        "run", "classify", "-", "--engine", "llamacpp", "--json", cwd=place, stdin=text, timeout=120
    )
    *rows, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, summary["ok"]) == (0, 2), done.stderr
    assert all(row["output"]["label"] in {"sports", "cooking"} for row in rows)


def test_embed_says_what_it_needs_or_embeds(place: Path) -> None:
    done = headrace("run", "embed", "-", cwd=place, stdin='"a text"\n')
    found = json.loads(done.stdout)
    if done.returncode == 0:
        assert abs(sum(x * x for x in found["output"]) - 1) < 1e-3
    else:
        assert "pip install 'headrace[embed]'" in found["error"]["message"]
