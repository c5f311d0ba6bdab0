"""What docs/generate.py writes is what stands in docs/."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.contracts import codec

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"


def test_schemas_and_settings_in_docs_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"run python docs/generate.py\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("schema", codec.SCHEMAS, ids=lambda schema: schema.name)
def test_every_message_has_its_schema(schema):
    found = json.loads((SCHEMAS / f"{schema.name.replace('/', '-')}.json").read_text("utf-8"))
    assert found["$defs"]


def test_every_file_link_and_crash_point_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files = {
        path.as_posix()
        for top in ("contracts", "services", "tests", "docs")
        for path in (ROOT / top).rglob("*.py")
    }
    for name in set(re.findall(r"`([\w/]+\.py)`", text)) | set(re.findall(r"python (docs/\w+\.py)", text)):
        assert any(path.endswith(f"/{name}") for path in files), name
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    code = "".join(path.read_text("utf-8") for path in (ROOT / "services").rglob("*.py"))
    for line in text.splitlines():
        if "crash point" in line and line.startswith("|"):
            for point in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", line.rsplit("|", 2)[1]):
                assert f'crash_point("{point}")' in code, point


def test_every_decision_is_in_the_list_and_at_most_a_page():
    folder = ROOT / "docs" / "adr"
    listed = (folder / "README.md").read_text("utf-8")
    for path in folder.glob("0*.md"):
        text = path.read_text("utf-8")
        assert path.name in listed
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences"))
        assert len(text.split()) < 500
