"""Each service starts without the packages that only others need."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXTRAS = ("duckdb", "pyarrow", "tokenizers", "jinja2", "xllamacpp", "vllm", "torch", "transformers", "psutil")


@pytest.mark.parametrize(
    ("module", "may_have"),
    [
        ("headrace.contracts.codec", ()),
        ("headrace.client", ()),
        ("headrace.inference_worker.service", ()),
        ("headrace.inference_worker.engines.echo", ()),
        ("headrace.inference_worker.engines.sim", ()),
        ("headrace.gateway.service", ()),
        ("headrace.completion.service", ("duckdb",)),
        ("headrace.cli.main", ()),
    ],
)
def test_imports_without_the_others(module: str, may_have: tuple[str, ...]) -> None:
    hidden = [name for name in EXTRAS if name not in may_have]
    code = f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\nimport {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_contracts_import_msgspec_only() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport headrace.contracts.api, headrace.contracts.topology\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(new - {'typing_extensions'}))"  # msgspec itself looks whether it is there
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['headrace', 'msgspec']"
