"""Jobs that users reported as misread by such systems: all failed (B9), one straggler among many short ones (S6)."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.cli.harness import HEADRACE, Reader, Up, clean_environment


def test_b9_all_items_fail_and_the_job_says_so(echo_mesh, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text((json.dumps({"prompt": "no", "repetition_penalty": 1.5}) + "\n") * 9)
    echo_mesh.json("submit", str(path), "--job", "b9")
    done = echo_mesh.run("watch", "b9", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["state"], found["failed"], found["ok"]) == ("completed_with_errors", 9, 0)
    rows = [json.loads(row) for row in echo_mesh.run("results", "b9").stdout.splitlines()]
    assert [(r["index"], r["status"]) for r in rows] == [(i, "failed") for i in range(9)]
    assert all(r["error"]["type"] for r in rows)
    audit = echo_mesh.json("audit", "b9")
    assert audit["balanced"]
    assert [(s["submitted"], s["failed"]) for s in audit["shapes"]] == [(9, 9)]


@pytest.mark.slow
def test_s6_two_hundred_short_items_land_while_one_emits_to_its_cap(tmp_path):
    """The account shows the straggler as queued and running, and the others as landed, in their shapes."""
    up = Up(tmp_path / "D", engine="sim")
    try:
        path = tmp_path / "in.jsonl"
        long = {"prompt": "tell all", "max_tokens": 1_500, "min_tokens": 1_500}
        short = [{"prompt": f"say {i}", "max_tokens": 2} for i in range(200)]
        path.write_text("".join(json.dumps(item) + "\n" for item in (long, *short)))
        up.json("submit", str(path), "--job", "s6")
        watch = subprocess.Popen(
            [*HEADRACE, "watch", "s6", "--dir", str(up.folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=clean_environment(),
        )  # fmt: skip
        shown = Reader(watch.stderr)
        done = up.run("audit", "s6", "--watch", "--json", "--interval", "0.2")
        assert done.returncode == 0, done.stderr
        samples = [json.loads(line) for line in done.stdout.splitlines()]
        alone = [s for s in samples if s["ok"] == 200 and s["queued"] == 1]
        assert len(alone) >= 5, [(s["ok"], s["queued"], s["landing"]) for s in samples]
        assert all(s["running"] == 1 and s["oldest_running_us"] for s in alone[5:-1])
        shapes = {s["shape"]: (s["submitted"], s["ok"], s["queued"]) for s in alone[0]["shapes"]}
        assert shapes == {"t6": (200, 200, 0), "t11": (1, 0, 1)}
        assert (samples[-1]["state"], samples[-1]["ok"]) == ("completed", 201)
        assert watch.wait(60) == 0
        assert any("oldest running item: " in line for line in shown.lines), shown.lines
    finally:
        up.kill()
