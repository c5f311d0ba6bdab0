"""`headrace pipeline` against a real mesh, and the example of its page as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Up, headrace

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


def blocks(kind: str) -> list[str]:
    """The code blocks of the page that are of this kind."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def example(echo_mesh: Up, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's two files; the pipeline has run to its end."""
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "topics.jsonl").write_text(blocks("json")[0])
    (folder / "answers.toml").write_text(blocks("toml")[0])
    done = echo_mesh.run("pipeline", "run", str(folder / "answers.toml"), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert (ended["pipeline"], ended["state"]) == ("answers", "completed")
    assert done.stderr.startswith("pipeline answers: 2 rows stored as answers-questions\n")
    return folder / "answers.toml"


def test_the_example_of_the_page(echo_mesh: Up, example: Path) -> None:
    status = echo_mesh.json("pipeline", "status", "answers")
    assert [(s["stage"], s["job"], s["state"], s["submitted"], s["ok"]) for s in status["stages"]] == [
        ("questions", "answers-questions", "completed", 2, 2),
        ("answers", "answers-answers", "completed", 2, 2),
        ("summaries", "answers-summaries", "completed", 2, 2),
    ]
    lines = [json.loads(line) for line in echo_mesh.run("results", "answers-summaries").stdout.splitlines()]
    first = json.loads(blocks("json")[0].splitlines()[0])["prompt"]
    assert lines[0]["output"] == f"Sum up:\nAnswer in one sentence.\n{first}"
    kept = echo_mesh.json(
        "sql", "SELECT kept->>'question' AS q FROM stage_kept WHERE job = 'answers-answers'"
    )
    assert {row["q"] for row in kept} == {json.loads(t)["prompt"] for t in blocks("json")[0].splitlines()}
    text = echo_mesh.run("pipeline", "status", "answers").stdout
    assert "pipeline answers: completed" in text
    assert "summaries" in text


def test_audit_list_and_the_same_command_again(echo_mesh: Up, example: Path) -> None:
    audit = echo_mesh.json("pipeline", "audit", "answers")
    assert audit["balanced"] is True
    assert [(s["arrived"], s["fed"], s["assigned"], s["expected"]) for s in audit["stages"][1:]] == [
        (2, 2, 2, 2), (2, 2, 2, 2)
    ]  # fmt: skip
    assert "balanced" in echo_mesh.run("pipeline", "audit", "answers").stdout
    assert "answers" in [p["pipeline"] for p in echo_mesh.json("pipeline", "list")]
    assert "answers" in echo_mesh.run("pipeline", "list").stdout
    again = echo_mesh.json("pipeline", "run", str(example))
    assert again == {
        "pipeline": "answers",
        "jobs": ["answers-questions", "answers-answers", "answers-summaries"],
        "submitted": 2,
        "refused": 0,
        "resumed_from": 2,
    }
    tenant = echo_mesh.json("audit")
    assert tenant["unbalanced"] == []
    refused = echo_mesh.run("retry", "answers-answers", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "feeds_a_stage"


def write(folder: Path, **changes: Any) -> Path:
    """A pipeline of two stages whose text is changed."""
    text = 'input = "r.jsonl"\n[[stage]]\nname = "a"\nfunction = "generate"\n'
    text += '[[stage]]\nname = "b"\nfunction = "FUNCTION"\nROW\n'
    for name, value in ({"FUNCTION": "generate", "ROW": ""} | changes).items():
        text = text.replace(name, value)
    (folder / "r.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    path = folder / "two.toml"
    path.write_text(text)
    return path


def test_what_is_wrong_is_one_line_with_stage_and_field(echo_mesh: Up, tmp_path: Path) -> None:
    wrong = echo_mesh.run("pipeline", "run", str(write(tmp_path, ROW='row = "values"')), "--json")
    assert wrong.returncode == 2
    error = json.loads(wrong.stdout)["error"]
    assert (error["code"], error["field"]) == ("invalid_pipeline", "stage.b.row")
    assert wrong.stderr.startswith(
        "error: stage b, row: 'values' begins with 'values': a path begins with one of"
    )
    unknown = echo_mesh.run("pipeline", "run", str(write(tmp_path, FUNCTION="nobody")), "--json")
    assert unknown.returncode == 1
    assert json.loads(unknown.stdout)["error"]["code"] == "unknown_function"
    assert "stage b: function 'nobody' is not registered; known: " in unknown.stderr
    assert echo_mesh.run("pipeline", "status", "two").returncode == 1
    assert (
        json.loads(echo_mesh.run("pipeline", "audit", "two", "--json").stdout)["error"]["code"]
        == "unknown_pipeline"
    )
    bad = write(tmp_path)
    (tmp_path / "r.jsonl").write_text("{}\nno JSON\n")
    lines = echo_mesh.run("pipeline", "run", str(bad), "--name", "bad")
    assert lines.returncode == 2
    assert "line 2" in lines.stderr
    assert echo_mesh.json("pipeline", "run", str(bad), "--name", "bad", "--skip-bad")["refused"] == 1
    for command in ("run", "status", "audit", "cancel"):
        assert headrace("pipeline", command).returncode == 2
    assert echo_mesh.run("pipeline", "run", str(tmp_path / "none.toml")).returncode == 1


def test_an_end_with_failed_rows_and_a_cancelled_one(echo_mesh: Up, tmp_path: Path) -> None:
    path = write(tmp_path, ROW='each = "value.n"')
    ended = echo_mesh.run("pipeline", "run", str(path), "--name", "failing", "--wait", "--json", timeout=90)
    assert ended.returncode == 3, ended.stderr
    assert [(s["ok"], s["failed"], s["unfit"]) for s in json.loads(ended.stdout)["stages"]] == [
        (2, 0, 0),
        (0, 2, 2),
    ]
    # It had ended: nothing is changed.
    cancelled = echo_mesh.json("pipeline", "cancel", "failing", "--reason", "late")
    assert (cancelled["state"], cancelled["reason"]) == ("completed_with_errors", None)
    assert echo_mesh.run("pipeline", "run", str(path), "--name", "failing").returncode == 0


def test_without_its_input_nothing_is_opened(echo_mesh: Up, tmp_path: Path) -> None:
    path = write(tmp_path)
    done = echo_mesh.run(
        "pipeline", "run", str(path), "--name", "unstarted", "--input", str(tmp_path / "none")
    )
    assert done.returncode == 1
    assert done.stderr == f"error: input: there is no file {tmp_path / 'none'}\n"
    assert echo_mesh.run("pipeline", "status", "unstarted").returncode == 1
