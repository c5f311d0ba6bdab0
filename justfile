# `just` comes with the dev requirements: .venv/bin/just, or any other copy of it.
set positional-arguments
bin := env("VIRTUAL_ENV", justfile_directory() / ".venv") / "bin"

_list:
    @{{bin}}/just --list --unsorted || just --list --unsorted

# A virtual environment with everything that the tests need
setup:
    python3 -m venv .venv
    .venv/bin/pip install -q --require-hashes -r requirements/dev.txt
    .venv/bin/pip install -q --no-deps --no-build-isolation -e .
