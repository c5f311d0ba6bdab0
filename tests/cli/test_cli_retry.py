"""`headrace retry` against a real mesh whose engine refuses some items at first, and is mended then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.harness import Up, headrace

PER_GENERATION = (
    "SELECT generation, status, count(*) AS n FROM outcomes WHERE job = 'j' GROUP BY ALL ORDER BY ALL"
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred prompts, ten of them bad."""
    path = tmp_path_factory.mktemp("in") / "prompts.jsonl"
    texts = [f"{'bad' if i % 10 == 3 else 'good'} {i}" for i in range(100)]
    path.write_text("".join(json.dumps({"prompt": t, "max_tokens": 8}) + "\n" for t in texts))
    return path


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ten_of_a_hundred_run_again(tmp_path: Path, prompts: Path) -> None:
    """A14: 10 executed, not 100; their rows stand beside the old ones; the account balances."""
    folder = tmp_path / "D"
    up = Up(folder, "--engine-option", "fail_on=bad")
    try:
        up.json("submit", str(prompts), "--job", "j")
        assert up.run("watch", "j").returncode == 3
        # Still bad: generation 2 fails as generation 1 did, and may be retried as well.
        assert up.json("retry", "j") == {"job": "j", "generation": 2, "resubmitted": 10}
        watched = up.run("watch", "j", "--json")
        assert watched.returncode == 3
        assert json.loads(watched.stdout)["failed"] == 10
        done = up.run("retry", "j", "--where", "error_type = 'none such'", "--json")
        assert (done.returncode, json.loads(done.stdout)) == (
            0,
            {"job": "j", "generation": 2, "resubmitted": 0},
        )
        assert done.stderr == "j has no failed or dead item that fits: nothing runs again\n"
        bad = up.run("retry", "j", "--where", "error_type =", "--json")
        assert bad.returncode == 2
        assert json.loads(bad.stdout)["error"]["field"] == "where"
        assert "the condition `error_type =` is not taken" in bad.stderr
        assert up.stop() == 0
    finally:
        up.kill()
    up = Up(folder)
    try:
        done = up.run("retry", "j", "--where", '"index" < 50')
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "j: 5 items run again as generation 3\n"
        assert up.run("watch", "j").returncode == 3
        assert up.json("retry", "j") == {"job": "j", "generation": 4, "resubmitted": 5}
        assert up.run("watch", "j").returncode == 0
        assert up.json("sql", PER_GENERATION) == [
            {"generation": 1, "status": "failed", "n": 10},
            {"generation": 1, "status": "ok", "n": 90},
            {"generation": 2, "status": "failed", "n": 10},
            {"generation": 3, "status": "ok", "n": 5},
            {"generation": 4, "status": "ok", "n": 5},
        ]
        audit = up.json("audit", "j")
        assert (audit["balanced"], audit["ok"], audit["generation"]) == (True, 100, 4)
        lines = [json.loads(line) for line in up.run("results", "j").stdout.splitlines()]
        assert [(line["index"], line["status"]) for line in lines] == [(i, "ok") for i in range(100)]
        none = up.run("retry", "j")
        assert (none.returncode, none.stdout) == (0, "")
        assert none.stderr == "j has no failed or dead item: nothing runs again\n"
        again = up.run("submit", str(prompts), "--job", "j", "--json")
        assert json.loads(again.stdout)["resumed_from"] == 100
        assert up.json("audit", "j")["submitted"] == 100
    finally:
        up.kill()


def test_what_cannot_be_retried_is_one_line(echo_mesh: Up) -> None:
    unknown = echo_mesh.run("retry", "never-was", "--json")
    assert unknown.returncode == 1
    assert json.loads(unknown.stdout)["error"]["code"] == "unknown_job"
    assert echo_mesh.run("retry", "a b").returncode == 2
    long = echo_mesh.run("retry", "j", "--where", "x" * 3_000)
    assert long.returncode == 2
    assert long.stderr == "error: --where has 3,000 characters: 2,048 at most\n"
    assert headrace("retry").returncode == 2
