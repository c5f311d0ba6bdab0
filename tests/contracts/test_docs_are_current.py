"""What docs/generate.py writes is what stands in docs/."""

from __future__ import annotations

import json
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
