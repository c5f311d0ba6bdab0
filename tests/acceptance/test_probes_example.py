"""examples/probes as it stands: one command from documents to Parquet, with a model that repeats what it is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.harness import clean_environment

RUN = Path(__file__).parents[2] / "examples" / "probes" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_documents_become_probes_in_one_command(tmp_path: Path) -> None:
    documents = [
        {"title": "a", "text": "What is a headrace?"},
        {"title": "b", "text": "When was the first canal in the country dug, and who paid for it?"},
        {"title": "a again", "text": "What is a headrace?"},
        {"title": "no question", "text": "A statement."},
        {"title": "no text", "text": ""},
    ]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))
    out = tmp_path / "probes.parquet"
    command = [sys.executable, str(RUN), "--engine", "echo", "--dir", str(tmp_path / "D")]
    command += ["--documents", str(path), "--out", str(out)]
    # A document without text fails alone.
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    probes = [json.loads(text) for text in pq.read_table(out).column("output").to_pylist()]
    assert [(p["title"], p["question"]) for p in probes] == [
        ("a", "What is a headrace?"),
        ("b", "When was the first canal in the country dug, and who paid for it?"),
    ]
    assert "pipeline probes: completed_with_errors, balanced" in done.stdout
    assert "left out: 1 near-duplicates, 5 lines that are no questions" in done.stdout
